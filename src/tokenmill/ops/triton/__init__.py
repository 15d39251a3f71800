"""The operations as Triton kernels. Imported only where triton is: on GPUs, or with its interpreter."""
