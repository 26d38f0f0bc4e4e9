// For functions of headers that the host and the kernels share, so that files without CUDA read them too.
#pragma once

#ifdef __CUDACC__
#define FLASH_EXT_HOST_DEVICE __host__ __device__
#else
#define FLASH_EXT_HOST_DEVICE
#endif
