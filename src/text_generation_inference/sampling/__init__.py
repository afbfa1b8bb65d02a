"""From logits to tokens: what each sampling parameter means, in plain torch, and the one sampler that applies them.

One file per concept, in the order of application: `watermark`, `penalties`, `bias`, `mask`, `temperature`, the filters
(`filters` is their table), `draw`; `tops` reports the best ids. Each file has what a slot keeps of its request, and the
formula. Formulas read no value on the host and have shapes that depend on
those of their inputs alone, with a neutral number for a row that does not ask: they run op by op, in a captured graph,
and in one that a compiler makes for each shape. Kernels that compute the same faster are tested against them.

All scores are float32 `[rows, vocab]`; numbers are `[rows]`. A dropped score is -inf.
"""
