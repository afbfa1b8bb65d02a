from habana_frameworks.torch.hpex import kernels, normalization

__all__ = ["kernels", "normalization"]
