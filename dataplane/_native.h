/* What the files of nexuskv.dataplane._native share. None of them keeps state between calls. */
#ifndef NK_NATIVE_H
#define NK_NATIVE_H

#include <stddef.h>
#include <stdint.h>

/* A piece of caller memory; the regions of a page follow each other as one stream. */
typedef struct {
    uint8_t *at;
    size_t length;
} nk_region;

/* One instruction set's kernels (_copyhash.h). Each returns the XXH3-64 of the page's bytes. */
typedef struct {
    const char *name;
    uint64_t (*load)(const uint8_t *slot, const nk_region *regions, size_t count);
    uint64_t (*store)(uint8_t *slot, const nk_region *regions, size_t count);
    uint64_t (*hash)(const uint8_t *bytes, size_t length);
} nk_kernel;

extern const nk_kernel nk_kernel_base;
#if defined(__x86_64__)
extern const nk_kernel nk_kernel_avx2;
#endif

/* The best kernels this processor can run. */
const nk_kernel *nk_kernel_best(void);

#endif
