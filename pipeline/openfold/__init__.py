"""OpenFold3's own model as a source of inputs and as the thing that is timed.

`batches`  real training batches stored in the repository, and a crop of them for small machines
`capture`  q, k, v, bias, mask and output gradients recorded at OpenFold3's triangle-attention sites
`model`    the real `OpenFold3AllAtom` training module: depth, recycles, pair-stack backend
`flex`     FlexAttention in the model's triangle attentions, one of the backends
`ranks`    the processes of one optimizer step: devices, reductions, agreement on failure
`step`     one optimizer step, phase by phase
`busy`     time in which the GPU worked and on what, from a profile

Only `model` and what builds on it need openfold3; batches and captured arrays are read without it.
"""
