/* Copy and hash at once: the kernels, compiled once for each instruction set.
 *
 * A file that includes this names the set with `#pragma GCC target` and defines NK_SUFFIX. Each
 * kernel walks a page in steps that stay in the first-level cache between the copy and the hash:
 *   load   copies segment -> regions and hashes the DESTINATION: what the consumer will read
 *   store  hashes the SOURCE, then copies regions -> segment
 * A source that changes between its hash and its copy gives a page that fails its checksum; hashing
 * the destination instead would give a torn page a good checksum.
 *
 * Small steps and a loop that asks for both sides' next lines beat large steps around memcpy by a
 * third: the hash of one step runs while the next one's lines arrive.
 */
#ifndef NK_COPYHASH_H
#define NK_COPYHASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "_native.h"

#define NK_STEP_BYTES ((size_t)4096)
#define NK_AHEAD_BYTES ((size_t)2048) /* how far in front of the copy lines are asked for */
#define NK_BLOCK_BYTES ((size_t)128)
#define NK_LINE_BYTES 64

typedef uint8_t nk_vector __attribute__((vector_size(32), aligned(1), may_alias));

#define NK_JOIN_(a, b) a##b
#define NK_JOIN(a, b) NK_JOIN_(a, b)
#define NK_NAME(stem) NK_JOIN(stem, NK_SUFFIX)

/* Copy a step whose next NK_AHEAD_BYTES belong to the same page: none of a neighbour's lines is
 * asked for. Whole blocks only; returns the bytes copied. */
static inline size_t NK_NAME(copy_ahead_)(uint8_t *to, const uint8_t *from, size_t length)
{
    size_t done = 0;
    for (; done + NK_BLOCK_BYTES <= length; done += NK_BLOCK_BYTES) {
        nk_vector *out = (nk_vector *)(to + done);
        const nk_vector *in = (const nk_vector *)(from + done);
        for (size_t line = 0; line < NK_BLOCK_BYTES; line += NK_LINE_BYTES) {
            __builtin_prefetch(from + done + NK_AHEAD_BYTES + line, 0);
            __builtin_prefetch(to + done + NK_AHEAD_BYTES + line, 1);
        }
        nk_vector a = in[0], b = in[1], c = in[2], d = in[3];
        out[0] = a;
        out[1] = b;
        out[2] = c;
        out[3] = d;
    }
    return done;
}

/* Copy one step; `left` bytes of the region lie from here on. */
static inline void NK_NAME(copy_)(uint8_t *to, const uint8_t *from, size_t step, size_t left)
{
    size_t done = left >= step + NK_AHEAD_BYTES ? NK_NAME(copy_ahead_)(to, from, step) : 0;
    memcpy(to + done, from + done, step - done);
}

static uint64_t NK_NAME(load_)(const uint8_t *slot, const nk_region *regions, size_t count)
{
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (size_t i = 0; i < count; i++) {
        uint8_t *to = regions[i].at;
        for (size_t left = regions[i].length, step; left; left -= step) {
            step = left < NK_STEP_BYTES ? left : NK_STEP_BYTES;
            NK_NAME(copy_)(to, slot, step, left);
            XXH3_64bits_update(&state, to, step);
            to += step;
            slot += step;
        }
    }
    return XXH3_64bits_digest(&state);
}

static uint64_t NK_NAME(store_)(uint8_t *slot, const nk_region *regions, size_t count)
{
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (size_t i = 0; i < count; i++) {
        const uint8_t *from = regions[i].at;
        for (size_t left = regions[i].length, step; left; left -= step) {
            step = left < NK_STEP_BYTES ? left : NK_STEP_BYTES;
            XXH3_64bits_update(&state, from, step);
            NK_NAME(copy_)(slot, from, step, left);
            from += step;
            slot += step;
        }
    }
    return XXH3_64bits_digest(&state);
}

static uint64_t NK_NAME(hash_)(const uint8_t *bytes, size_t length)
{
    return XXH3_64bits(bytes, length);
}

#endif
