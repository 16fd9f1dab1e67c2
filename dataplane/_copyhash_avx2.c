/* The kernels for AVX2; chosen at run time, so the module still loads on older processors. */
#if defined(__x86_64__)
#pragma GCC target("avx2,prfchw") /* prefetchw does nothing where it is unknown */
#define NK_SUFFIX avx2
#include "_copyhash.h"

const nk_kernel nk_kernel_avx2 = {"avx2", load_avx2, store_avx2, hash_avx2};
#else
typedef int nk_no_avx2_here;
#endif
