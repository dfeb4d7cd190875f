"""Pure functions over pytrees. Nothing here knows of requests or text.

The axis key, used in einsums, name suffixes (`q_TNH`) and comments everywhere:

    T  packed query tokens of a step   B  sequence slots         S  key positions
    P  pages of a sequence             D  model width            F  feed-forward width
    N  query heads                     K  key/value heads        G  = N / K
    H  head width                      V  vocabulary             E  experts
    L  layers                          Q  packed rows of logits  C  rows of a rectangle
    W  query tokens of a row           R  rows of all rectangles, or a few rows of Q
    A  rows of an admission            J  entries chosen from a row of logits
    M  state width (SSM)               X  any other axis, said where it stands
    k  drafts per sequence (lower case). In latent attention C is the rank, R the rope width.

The packed T of a step is two rectangles, decode rows [C, W = 1 + k] and prefill tiles
[C, W = tile tokens]; everything token-wise sees one [T, D], only mixers look at the rectangles.
"""
