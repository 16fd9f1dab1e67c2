/* A batch of pages, parsed and checked: what the copying loop works on without the GIL. */
#ifndef NK_BATCH_H
#define NK_BATCH_H

#include "_python.h"

#include <stdatomic.h>

#include "_native.h"

#define NK_ID_BYTES_MAX 64
#define NK_KEY_BYTES_MIN 8
#define NK_KEY_BYTES_MAX 64
#define NK_THREADS_MAX 64

typedef enum { NK_LOAD, NK_STORE, NK_CHECK } nk_action;

/* Values of nexuskv.types.PageStatus. */
enum { NK_HIT = 0, NK_STORED = 1, NK_MISS = 3, NK_CORRUPT = 4, NK_STALE = 5, NK_UNAVAILABLE = 7 };

typedef struct {
    uint8_t *slot; /* in the segment; NULL where the batch names no page */
    size_t size;
    uint64_t checksum;
    uint64_t generation;
    const uint64_t *generation_now; /* in the slot table; NULL unless loading */
    const nk_region *regions;
    size_t region_count;
} nk_page;

typedef struct {
    uint64_t segment_id;
    uint64_t address;
    uint64_t length;
} nk_segment;

typedef struct {
    uint64_t address;
    uint64_t length;
    uint64_t chunk_bytes;
    uint64_t header_bytes;
    uint64_t record_bytes;
    uint64_t generation_offset;
} nk_table;

typedef struct {
    nk_action action;
    nk_segment segment;
    nk_table table;
    Py_buffer descriptors;
    Py_buffer keys;
    Py_buffer namespace_id;
    size_t key_bytes;
    double deadline_s;
    int threads;
    nk_page *pages;
    size_t page_count;
    nk_region *regions; /* of all pages, in order */
    Py_buffer **exports; /* held for as long as the regions are used */
    size_t region_count;
    size_t region_room;
    uint8_t *statuses;
    uint64_t *checksums;
    const nk_kernel *kernel;
    atomic_size_t next; /* the page the next free thread takes */
} nk_batch;

/* Fill `pages` from the descriptors and, unless checking, from `items`, a sequence of buffers or of
 * sequences of buffers. 0 on success; else -1 with an exception set: IndexError where a descriptor
 * leaves the segment or its table, ValueError and BufferError for the caller's own mistakes. */
int nk_batch_build(nk_batch *batch, PyObject *items);

/* Give back everything the batch holds. Safe on a batch that was only zeroed. */
void nk_batch_free(nk_batch *batch);

/* 1 if loading would write one byte twice, or into the segment itself. Needs no GIL. */
int nk_batch_overlaps(const nk_batch *batch);

#endif
