/* Copy and hash at once: the kernels, compiled once for each instruction set.
 *
 * A file that includes this names the set with `#pragma GCC target` and defines NK_SUFFIX. Each
 * kernel walks a page in steps that stay in cache between the copy and the hash:
 *   load   copies segment -> regions and hashes the DESTINATION: what the consumer will read
 *   store  hashes the SOURCE, then copies regions -> segment
 * A source that changes between its hash and its copy gives a page that fails its checksum; hashing
 * the destination instead would give a torn page a good checksum.
 */
#ifndef NK_COPYHASH_H
#define NK_COPYHASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "_native.h"

#define NK_STEP_BYTES ((size_t)64 * 1024)

#define NK_JOIN_(a, b) a##b
#define NK_JOIN(a, b) NK_JOIN_(a, b)
#define NK_NAME(stem) NK_JOIN(stem, NK_SUFFIX)

static uint64_t NK_NAME(load_)(const uint8_t *slot, const nk_region *regions, size_t count)
{
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (size_t i = 0; i < count; i++) {
        for (size_t done = 0; done < regions[i].length;) {
            size_t left = regions[i].length - done;
            size_t step = left < NK_STEP_BYTES ? left : NK_STEP_BYTES;
            memcpy(regions[i].at + done, slot, step);
            XXH3_64bits_update(&state, regions[i].at + done, step);
            slot += step;
            done += step;
        }
    }
    return XXH3_64bits_digest(&state);
}

static uint64_t NK_NAME(store_)(uint8_t *slot, const nk_region *regions, size_t count)
{
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (size_t i = 0; i < count; i++) {
        for (size_t done = 0; done < regions[i].length;) {
            size_t left = regions[i].length - done;
            size_t step = left < NK_STEP_BYTES ? left : NK_STEP_BYTES;
            XXH3_64bits_update(&state, regions[i].at + done, step);
            memcpy(slot, regions[i].at + done, step);
            slot += step;
            done += step;
        }
    }
    return XXH3_64bits_digest(&state);
}

static uint64_t NK_NAME(hash_)(const uint8_t *bytes, size_t length)
{
    return XXH3_64bits(bytes, length);
}

#endif
