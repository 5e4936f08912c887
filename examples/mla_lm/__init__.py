"""A DeepSeek-V2/V3 language model in plain PyTorch whose KV cache is split over ranks.

It needs torch and safetensors only, and never imports dcp_inductor: the compiler finds
the exchanges by itself.
"""
