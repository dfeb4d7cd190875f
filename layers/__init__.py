"""Pure functions over pytrees. Nothing here knows of requests or text.

The axis key, used in einsums, name suffixes (`q_TNH`) and comments everywhere:

    T  packed query tokens of a step   B  sequence slots         S  key positions
    P  pages of a sequence             D  model width            F  feed-forward width
    N  query heads                     K  key/value heads        G  = N / K
    H  head width                      V  vocabulary             E  experts
    L  layers                          Q  packed rows of logits  J  entries chosen from one
    C  latent rank                     R  rope width (latent)    M  state width (SSM)
    Y  rows of a step's rectangles     W  query tokens of a row  A  rows of an admission
    Z  rows of a kernel's grid, or products of a batch           U  query rows of a product
    X  any other axis, said where it stands                      k  drafts per sequence

In `inference/` R is decode rows, N nodes of a tree of drafts, and n alternatives of a token; G of
`topk` is groups of the vocabulary.

The packed T of a step is two rectangles, decode rows [Y, W = 1 + k] and prefill chunks
[Y, W = chunk tokens]; everything token-wise sees one [T, D], only mixers look at the rectangles.
"""
