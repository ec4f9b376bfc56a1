"""The counting task: one small transformer with a positional and a semantic solution (Appendix A, Fig. 1).

# notation: L length, T tokens, d = d_m width, p hidden units, n sequences, K runs; E (T, d) and P (L, d) the
# embeddings, Q, K, V (d, d) query, key and value, S (L, L) the attention matrix of a sequence x (L,).

    X_i = E[x_i] + P_i,    S = softmax(X Q (X K)^T / sqrt(d)),    logits = W_2 relu(W_1 norm(S X V) + b_1) + b_2

The target at a place is the number of times that its token occurs in the sequence. The loss is the cross-entropy
averaged over the places. The first half of the coordinates belongs to the tokens, the second half to the positions. A
mask of zeros and ones with the shapes of the weights says which weights exist. The mask "free" is all ones; the others:

    semantic      E, P in their own halves; Q and K read the tokens' half
    positional    E, P in their own halves; Q and K read the positions' half

A masked weight starts at zero and its gradient is set to zero, so that it stays zero under any optimiser. Frozen and
free training therefore share one code path. An epoch (shuffling, batches, test) is one compiled scan, and several runs
are its `vmap`.

task        the sequences, the transformer, its masks and its attention
training    `train`, `unfreeze` and `compare`: frozen and free runs (Table 1)
"""

from .task import (
    MECHANISMS as MECHANISMS,
    Data as Data,
    Transformer as Transformer,
    attention as attention,
    counts as counts,
    mask as mask,
    sample as sample,
    shares as shares,
)
from .training import (
    OPTIMIZERS as OPTIMIZERS,
    SOLVED as SOLVED,
    History as History,
    Training as Training,
    compare as compare,
    table as table,
    train as train,
    unfreeze as unfreeze,
)
