"""`quantization_config` of a `config.json`: which modules are stored in few bits, and how.

What is read here is what `compressed-tensors`, AWQ, GPTQ and transformers' own `fp8` write, and in
`modelopt.py` ModelOpt's and Quark's; MXFP4 of gpt-oss is stored in its own way (`split_tensors`).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from configs.errors import InputError, shown
from configs.precision import FORMATS, GROUPS
from inference.families.shared.config_keys import Keys

# Endings of tensors that only modules in few bits have.
MARKS = "weight_packed", "qweight", "weight_scale", "weight_scale_inv", "qscale_weight"
METHODS = ("compressed-tensors", "awq", "gptq", "fp8", "modelopt", "quark")

_MAX_PATTERN, _MAX_REPEATS = 200, 4  # of a regular expression, which a file must not hang us with
_EMPTY: tuple[object, ...] = (None, {}, [], "")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.\d+\.")  # in the name of a module


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weight of a module is stored.

    Attributes:
        layout: key of `layouts.LAYOUTS`.
        bits: of an element.
        group: elements along a row that share a scale; None: all of them.
        is_float: elements are e4m3, or of four bits e2m1, not integers.
        is_symmetric: there are no zero points.
        has_order: the elements of a group do not follow one another.
        shares_rows: so many rows have the same scales, of which only one row's are stored; None:
            the whole tensor has one scale.
        activations: which of a token's activations are rounded to the same type with one scale:
            'token', all of them, or 'group'; 'tensor': by a constant; None: they stay.
        zero_offset: added to zero points as they are stored.
        has_powers: scales are powers of two, in a byte.
        has_tensor_scale: one of the tensor multiplies, or divides, the others.
    """

    layout: str
    bits: int
    group: int | None = None
    is_float: bool = False
    is_symmetric: bool = True
    has_order: bool = False
    shares_rows: int | None = 1
    activations: str | None = None
    zero_offset: int = 0
    has_powers: bool = False
    has_tensor_scale: bool = False

    def format(self, row: int) -> str | None:
        """Our format that holds the numbers of rows of so many elements; None: there is none, and
        they are dequantized.
        """
        if self.has_order_in(row):
            return None
        if self.has_tensor_scale or self.has_powers:
            return "nvfp4" if self.has_tensor_scale else f"mxfp{self.bits}"
        if self.shares_rows not in (None, 1):
            return "fp8_block" if self._has_our_blocks else None
        if self.bits == 8:
            if self.group not in (None, row) or not self.is_symmetric:
                return None
            kind = "fp8" if self.is_float else "int8"
            return (
                {"fp8": "w8a8_fp8", "int8": "w8a8"}[kind] if self.activations == "token" else kind
            )
        size = self.split(row)
        if size is None:
            return None
        suffix = "" if self.is_symmetric else "_asym"
        return f"int{self.bits}{suffix}{'' if size == GROUPS[0] else f'_g{size}'}"

    @property
    def _has_our_blocks(self) -> bool:
        ours = FORMATS["fp8_block"]
        assert self.shares_rows is not None and self.group is not None and ours.group is not None
        is_even = self.shares_rows % ours.rows == 0 == self.group % ours.group
        return is_even and self.is_float and self.is_symmetric

    def repeats(self, row: int, format: str) -> int:
        """Groups of one of our formats in each of its groups, in rows of so many elements."""
        size = FORMATS[format].group
        return 1 if size is None else (self.group or row) // size

    def split(self, row: int) -> int | None:
        """Elements of the groups of ours that hold those of a row of so many; None: none do."""
        group = self.group or row
        return next((size for size in GROUPS if group % size == 0 and row % size == 0), None)

    def has_order_in(self, row: int) -> bool:
        """As `has_order`, in a row of so many: one group has no order."""
        return self.has_order and self.group not in (None, row)

    @property
    def described(self) -> str:
        kind = f"{'fp' if self.is_float else 'int'}{self.bits}"
        size = "rows" if self.group is None else f"groups of {self.group}"
        blocks = "" if self.shares_rows == 1 else f" x {self.shares_rows or 'all'} rows"
        zeros = "" if self.is_symmetric else " with zero points"
        order = " in an order of their own" if self.has_order else ""
        return f"{kind} in {size}{blocks}{zeros}{order}"


Find = Callable[[str, bool], Scheme | None]  # of a module's name, and whether it is a table


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What a directory says of all its weights.

    Attributes:
        method: one of `METHODS`.
        find: the scheme of a module by its name; None: it is stored as numbers.
    """

    method: str
    find: Find

    def of(self, modules: Mapping[str, tuple[str, bool]]) -> "Quantization":
        """The same for modules by other names: where what is said of them has the names that they
        are stored by. Of `fp8` and ModelOpt, which list few of the modules that are stored as
        numbers, those without scales are.

        Args:
            modules: their names, and for each the stored one and whether it has one of `MARKS`.
        """

        def find(module: str, is_table: bool) -> Scheme | None:
            stored, is_marked = modules.get(module, (module, True))
            if not is_marked and self.method in ("fp8", "modelopt"):
                return None
            return self.find(stored, is_table)

        return dataclasses.replace(self, find=find)


def compressed_tensors(keys: Keys) -> Find:
    """Groups of modules by name, class or pattern, each with a scheme."""
    keys.require_neutral(
        kv_cache_scheme=_EMPTY,
        transform_config=_EMPTY,
        quantization_status=(None, "compressed"),
    )
    if sparsity := keys.nested("sparsity_config"):
        sparsity.require_neutral(format=(None, "dense"))
    default = keys.raw.get("format")
    groups = keys.nested("config_groups")
    if groups is None or not groups.raw:
        raise InputError("quantization_config: config_groups is missing")
    schemes = []
    for name in groups.raw:
        group = groups.nested(name)
        if group is None:
            raise InputError(f"{groups.label}{name} must be an object")
        format = group.raw.get("format")
        targets = _matcher(group, "targets")
        schemes.append((targets, _compressed_scheme(group, default if format is None else format)))
    ignored = _matcher(keys, "ignore")

    def find(module: str, is_table: bool) -> Scheme | None:
        if ignored(module, is_table):
            return None
        return next((scheme for targets, scheme in schemes if targets(module, is_table)), None)

    return find


_FORMATS = {
    "pack-quantized": "packed",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
    "nvfp4-pack-quantized": "scaled",
    "mxfp4-pack-quantized": "scaled",
    "mxfp8-quantized": "scaled",
}


def _compressed_scheme(group: Keys, format: object) -> Scheme:
    if not isinstance(format, str) or format not in _FORMATS:
        raise InputError(
            f"{group.label}format={shown(format)} is not served; valid: {', '.join(_FORMATS)}"
        )
    weights, layout = group.nested("weights"), _FORMATS[format]
    if weights is None:
        raise InputError(f"{group.label}weights is missing")
    group.require_neutral(output_activations=(None,))
    weights.require_neutral(dynamic=(None, False))
    is_float = weights.choice("type", {"int": "", "float": "float"}, "int") == "float"
    bits = weights.integer("num_bits", 8)
    if layout == "scaled":
        return _scaled(group, weights, format)
    served = {("packed", False): (3, 4, 8), ("plain", False): (8,), ("plain", True): (8,)}
    if bits not in (valid := served.get((layout, is_float), ())):
        raise InputError(
            f"{weights.label}{'float' if is_float else 'int'} of {bits} bits as {format} is not "
            f"served; valid: {', '.join(map(str, valid)) or 'int of 3, 4 or 8 bits'}"
        )
    size = weights.raw.get("group_size")
    default = "group" if size not in (None, -1) else "tensor" if size is None else "channel"
    kinds = {name: name for name in ("tensor", "channel", "group", "block")}
    strategy = weights.choice("strategy", kinds, default)
    rows: int | None = {"tensor": None}.get(strategy, 1)
    elements = weights.integer("group_size") if strategy == "group" else None
    if strategy == "block":
        rows, elements = _block(weights, "block_structure")
    order = weights.raw.get("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise InputError(f"{weights.label}actorder={shown(order)} is not served")
    return Scheme(
        layout,
        bits,
        elements,
        is_float,
        weights.boolean("symmetric", True),
        order in (True, "group", "dynamic"),
        rows,
        _activations(group, is_float, strategy),
    )


def _scaled(group: Keys, weights: Keys, format: str) -> Scheme:
    """Of floats whose groups have scales of eight bits; activations of any kind stay."""
    is_nvfp4, bits = format.startswith("nvfp4"), 8 if format.startswith("mxfp8") else 4
    size = 16 if is_nvfp4 else 32
    weights.require_neutral(
        type=("float",), num_bits=(bits,), group_size=(size,), symmetric=(True, None),
        strategy=("tensor_group", "group", None), actorder=(None, False),
    )  # fmt: skip
    activations = None if group.nested("input_activations") is None else "group"
    return Scheme(
        "scaled", bits, size, is_float=True, activations=activations, has_powers=not is_nvfp4,
        has_tensor_scale=is_nvfp4,
    )  # fmt: skip


def _activations(group: Keys, is_float: bool, strategy: str) -> str | None:
    """`Scheme.activations` of a group whose weights have such a strategy."""
    activations = group.nested("input_activations")
    if activations is None:
        return None
    is_static = is_float and strategy != "block" and activations.raw.get("dynamic") is False
    activations.require_neutral(
        dynamic=(not is_static,),
        strategy=("tensor", None)
        if is_static
        else ("token", "group")
        if strategy == "block"
        else ("token",),
        symmetric=(True, None),
        num_bits=(8, None),
        type=("float",) if is_float else ("int", None),
    )
    return str(activations.raw.get("strategy") or "tensor")


def _block(keys: Keys, key: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    value = keys.raw.get(key)
    if not isinstance(value, list) or len(value) != 2:
        raise InputError(f"{keys.label}{key} must list rows and columns, not {shown(value)}")
    rows, columns = (Keys({key: item}, keys.label).integer(key) for item in value)
    return rows, columns


def awq(keys: Keys) -> Find:
    """Four bits in groups with zero points."""
    keys.choice("version", {"gemm": "gemm", "GEMM": "gemm"}, "gemm")
    if keys.integer("bits", 4) != 4:
        raise InputError(f"{keys.label}bits={keys.raw['bits']} is not served; valid: 4")
    group = _group(keys)
    if not keys.boolean("zero_point", True):
        raise InputError(f"{keys.label}zero_point=False is not served; valid: true")
    return _in_layers(keys, Scheme("awq", 4, group, is_symmetric=False))


def gptq(keys: Keys) -> Find:
    """Integers in groups, perhaps in an order of their own."""
    bits = keys.integer("bits")
    if bits not in (3, 4, 8):
        raise InputError(f"{keys.label}bits={bits} is not served; valid: 3, 4, 8")
    offset = keys.choice(
        "checkpoint_format", {"gptq": "1", "gptq_v2": "0"}, "gptq"
    )  # which is `zero_offset`
    # Static groups are chosen before columns are ordered: their elements follow one another.
    places = keys, keys.nested("meta") or Keys({})
    is_static = any(place.boolean("static_groups", False) for place in places)
    scheme = Scheme(
        "gptq",
        bits,
        _group(keys),
        is_symmetric=keys.boolean("sym", True),
        has_order=keys.boolean("desc_act", False) and not is_static,
        zero_offset=int(offset),
    )
    return _in_layers(keys, scheme)


def _group(keys: Keys) -> int | None:
    return None if keys.raw.get("group_size") == -1 else keys.integer("group_size", 128)


def fp8(keys: Keys) -> Find:
    """e4m3 with a scale a tensor, or a block of one."""
    keys.choice("fmt", {"e4m3": "e4m3", "float8_e4m3fn": "e4m3"}, "e4m3")
    keys.require_neutral(
        scale_fmt=("ue8m0", "float", None), moe_quant_algo=(None,), quantized_layers=(None, {})
    )
    has_blocks = keys.raw.get("weight_block_size") is not None
    rows, columns = _block(keys, "weight_block_size") if has_blocks else (None, None)
    scales = {"dynamic": "group" if has_blocks else "token", "static": "tensor"}
    activations = keys.choice("activation_scheme", scales, "dynamic")
    if has_blocks and activations == "tensor":
        raise InputError(
            f"{keys.label}activation_scheme='static': is described beside weight_block_size, whose "
            "activations have a scale a group; valid: 'dynamic'"
        )
    scheme = Scheme("fp8", 8, columns, is_float=True, shares_rows=rows, activations=activations)
    skipped = names(keys, "modules_to_not_convert") + names(keys, "ignored_layers")
    has_fp4 = keys.choice("expert_dtype", {"fp4": "fp4", "fp8": "fp8"}, "fp8") == "fp4"
    experts = Scheme("mxfp4", 4, 32, is_float=True, has_powers=True)

    def find(module: str, is_table: bool) -> Scheme | None:
        if is_table or module == "lm_head" or _is_in(module, skipped):
            return None
        return experts if has_fp4 and _EXPERT.search(module) else scheme

    return find


def _in_layers(keys: Keys, scheme: Scheme) -> Find:
    """All matrices of the decoder's layers, but for those that are listed."""
    skipped = names(keys, "modules_to_not_convert")
    chosen = _listed(keys, "modules_in_block_to_quantize")
    has_head = keys.boolean("lm_head", False)
    patterns = []
    for pattern in (keys.nested("dynamic") or Keys({})).raw:
        if not pattern.startswith("-:"):
            raise InputError(f"{keys.label}dynamic={shown(pattern)} is not served; valid: '-:...'")
        patterns.append(_pattern(pattern.removeprefix("-:"), f"{keys.label}dynamic"))

    def find(module: str, is_table: bool) -> Scheme | None:
        inside = _LAYER.search(module) is not None
        if is_table or not (inside or (has_head and module == "lm_head")):
            return None
        if _is_in(module, skipped) or any(pattern.match(module) for pattern in patterns):
            return None
        is_left_out = inside and chosen and not module.endswith(chosen)
        return None if is_left_out else scheme

    return find


def _is_in(module: str, parts: tuple[str, ...]) -> bool:
    """Whether a name contains one of these, as whole words between points."""
    return any(f".{part}." in f".{module}." for part in parts)


def names(keys: Keys, key: str) -> tuple[str, ...]:
    """A list of names of modules; raises an `InputError` for anything else."""
    value = keys.raw.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{keys.label}{key} must list names of modules, not {shown(value)}")
    return tuple(value)


def _listed(keys: Keys, key: str) -> tuple[str, ...]:
    """Names in lists of lists."""
    value = keys.raw.get(key)
    if isinstance(value, list):
        value = [name for item in value for name in (item if isinstance(item, list) else [item])]
    return tuple(f".{name}" for name in names(Keys({key: value}, keys.label), key))


def _matcher(keys: Keys, key: str) -> Callable[[str, bool], bool]:
    """Whether a module is listed: by its name, its class, or a regular expression behind 're:'."""
    items = names(keys, key)
    exact = {item for item in items if not item.startswith("re:")}
    label = f"{keys.label}{key}"
    regexes = [_pattern(item[3:], label) for item in items if item.startswith("re:")]

    def matches(module: str, is_table: bool) -> bool:
        kind = "Embedding" if is_table else "Linear"
        return module in exact or kind in exact or any(regex.match(module) for regex in regexes)

    return matches


def _pattern(text: str, label: str) -> re.Pattern[str]:
    repeats = len(re.findall(r"[*+{]", text))
    if len(text) > _MAX_PATTERN or repeats > _MAX_REPEATS or re.search(r"\)[*+{]", text):
        raise InputError(
            f"{label}: {shown(text)} is no plain pattern: at most {_MAX_REPEATS} repetitions, "
            f"none of a group, in {_MAX_PATTERN} characters"
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise InputError(f"{label}: {shown(text)} is no regular expression: {error}") from None
