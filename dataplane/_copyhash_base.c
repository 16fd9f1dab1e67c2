/* The kernels for the instruction set every machine of this architecture has (x86-64: SSE2). */
#define NK_SUFFIX base
#include "_copyhash.h"

const nk_kernel nk_kernel_base = {"base", load_base, store_base, hash_base};
