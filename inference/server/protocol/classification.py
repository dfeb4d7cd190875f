"""Bodies of POST /classify, as vLLM has them."""

from msgspec import Struct

from inference.server.protocol.embeddings import PooledRequest, PooledUsage
from inference.server.protocol.fields import Inputs, Messages
from inference.server.protocol.tool_fields import Variables


class ClassifyRequest(PooledRequest, kw_only=True):
    """POST /classify. null stands for the default everywhere.

    Attributes:
        input: a text, token ids, or a list of one of the two.
        messages: of a conversation, which is labeled in the form of the chat template; the other
            fields of chats mean what they mean there.
        use_activation: probabilities are returned (the default), or else logits.
    """

    input: Inputs = None
    messages: Messages | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None


class Labels(Struct):
    """The likeliest label of one text, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classified(Struct):
    """Labels, in the order of the texts."""

    id: str
    created: int
    model: str
    data: list[Labels]
    usage: PooledUsage
    object: str = "list"
