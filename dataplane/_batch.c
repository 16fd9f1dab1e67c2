/* Parsing and checking a batch: after this, nothing about it can be wrong except the bytes. */
#include "_batch.h"

#include <stdlib.h>
#include <string.h>

#define DESCRIPTOR_BYTES 32
#define SLOT_ALIGN_BYTES 4096

typedef struct {
    uint32_t segment_id;
    uint32_t size;
    uint64_t offset;
    uint64_t checksum;
    uint64_t generation;
} descriptor;

static uint64_t little_endian(const uint8_t *at, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--)
        value = value << 8 | at[i];
    return value;
}

static descriptor read_descriptor(const uint8_t *at)
{
    return (descriptor){(uint32_t)little_endian(at, 4), (uint32_t)little_endian(at + 4, 4),
                        little_endian(at + 8, 8), little_endian(at + 16, 8),
                        little_endian(at + 24, 8)};
}

static int out_of_place(size_t i, const char *what)
{
    PyErr_Format(PyExc_IndexError, "descriptor %zu %s", i, what);
    return -1;
}

/* Where in the slot table the generation of the slot at `offset` lies. */
static int find_generation(const nk_table *table, size_t i, const descriptor *d, nk_page *page)
{
    uint64_t slot_bytes =
        ((uint64_t)d->size + SLOT_ALIGN_BYTES - 1) / SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES;
    uint64_t inside = d->offset % table->chunk_bytes;
    if (inside % slot_bytes || slot_bytes > table->chunk_bytes - inside)
        return out_of_place(i, "is at no slot of its chunk");
    uint64_t slot = d->offset / table->chunk_bytes * (table->chunk_bytes / SLOT_ALIGN_BYTES) +
                    inside / slot_bytes;
    uint64_t room = table->length - table->header_bytes; /* checked by check_table */
    if (slot >= room / table->record_bytes)
        return out_of_place(i, "names a slot past the end of the slot table");
    page->generation_now = (const uint64_t *)(uintptr_t)(
        table->address + table->header_bytes + slot * table->record_bytes +
        table->generation_offset);
    return 0;
}

static int place_page(const nk_batch *b, size_t i, const descriptor *d, nk_page *page)
{
    if (d->size == 0)
        return 0;
    if (d->segment_id != b->segment.segment_id)
        return out_of_place(i, "names another segment");
    if (d->offset % SLOT_ALIGN_BYTES)
        return out_of_place(i, "has an offset that is not aligned to 4096 bytes");
    if (d->offset > b->segment.length || d->size > b->segment.length - d->offset)
        return out_of_place(i, "reaches past the end of the segment");
    page->slot = (uint8_t *)(uintptr_t)(b->segment.address + d->offset);
    page->size = d->size;
    page->checksum = d->checksum;
    page->generation = d->generation;
    return b->action == NK_LOAD ? find_generation(&b->table, i, d, page) : 0;
}

static int check_segment(const nk_segment *s)
{
    if (s->address && s->address + s->length >= s->address)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the segment wraps around the address space");
    return -1;
}

/* Aligned so that each generation is read in one piece, and no sum below can overflow. */
static int check_table(const nk_table *t)
{
    int aligned = t->address % 8 == 0 && t->header_bytes % 8 == 0 && t->record_bytes % 8 == 0 &&
                  t->generation_offset % 8 == 0 && t->chunk_bytes % SLOT_ALIGN_BYTES == 0;
    int in_range = t->address && t->address + t->length >= t->address && t->chunk_bytes &&
                   t->record_bytes >= 8 && t->generation_offset <= t->record_bytes - 8 &&
                   t->header_bytes <= t->length;
    if (aligned && in_range)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the slot table's geometry is not aligned or in range");
    return -1;
}

static int check_keys(const nk_batch *b)
{
    size_t count = (size_t)b->descriptors.len / DESCRIPTOR_BYTES;
    if (b->descriptors.len % DESCRIPTOR_BYTES) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no whole number of descriptors",
                     b->descriptors.len);
        return -1;
    }
    if (b->key_bytes < NK_KEY_BYTES_MIN || b->key_bytes > NK_KEY_BYTES_MAX ||
        b->namespace_id.len > NK_ID_BYTES_MAX) {
        PyErr_SetString(PyExc_ValueError, "keys have 8-64 bytes, a namespace id at most 64");
        return -1;
    }
    if ((size_t)b->keys.len != count * b->key_bytes) {
        PyErr_Format(PyExc_ValueError, "%zu descriptors, but %zd bytes of keys of %zu bytes each",
                     count, b->keys.len, b->key_bytes);
        return -1;
    }
    return 0;
}

static int check_limits(const nk_batch *b)
{
    if (b->threads < 1 || b->threads > NK_THREADS_MAX || isnan(b->deadline_s)) {
        PyErr_SetString(PyExc_ValueError, "threads are 1-64 and deadline_s is a number");
        return -1;
    }
    if (check_segment(&b->segment) < 0 || (b->action == NK_LOAD && check_table(&b->table) < 0))
        return -1;
    return check_keys(b);
}

/* Room for `more` regions. Grows by doubling; pages point into the array only once it is full. */
static int make_room(nk_batch *b, size_t more)
{
    if (b->region_room - b->region_count >= more)
        return 0;
    size_t room = b->region_room * 2 + more;
    nk_region *regions = PyMem_Realloc(b->regions, room * sizeof *regions);
    if (regions)
        b->regions = regions;
    Py_buffer **exports = PyMem_Realloc(b->exports, room * sizeof *exports);
    if (exports)
        b->exports = exports;
    if (!regions || !exports) {
        PyErr_NoMemory();
        return -1;
    }
    b->region_room = room;
    return 0;
}

/* A Py_buffer may point into itself, so it is made where it stays until it is released. */
static int add_region(nk_batch *b, PyObject *object, size_t *total)
{
    Py_buffer *export = PyMem_Malloc(sizeof *export);
    if (!export) {
        PyErr_NoMemory();
        return -1;
    }
    int flags = b->action == NK_LOAD ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object, export, flags) < 0) {
        PyMem_Free(export);
        return -1;
    }
    if (export->len == 0) {
        PyBuffer_Release(export); /* nothing to copy, and no part in the question of overlap */
        PyMem_Free(export);
        return 0;
    }
    b->exports[b->region_count] = export;
    b->regions[b->region_count++] = (nk_region){export->buf, (size_t)export->len};
    *total += (size_t)export->len;
    return 0;
}

static int add_item(nk_batch *b, size_t i, PyObject *item)
{
    nk_page *page = &b->pages[i];
    size_t total = 0, first = b->region_count;
    PyObject *parts = PyObject_CheckBuffer(item) ? PyTuple_Pack(1, item) : PySequence_Tuple(item);
    if (!parts)
        return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(parts);
    int failed = make_room(b, (size_t)count);
    for (Py_ssize_t at = 0; !failed && at < count; at++)
        failed = add_region(b, PyTuple_GET_ITEM(parts, at), &total);
    Py_DECREF(parts);
    if (failed)
        return -1;
    page->region_count = b->region_count - first;
    if (total == page->size)
        return 0;
    PyErr_Format(PyExc_ValueError, "item %zu has %zu bytes in all, its page %zu", i, total,
                 page->size);
    return -1;
}

static int add_items(nk_batch *b, PyObject *items)
{
    PyObject *all = PySequence_Tuple(items);
    if (!all)
        return -1;
    int failed = 0;
    if ((size_t)PyTuple_GET_SIZE(all) != b->page_count) {
        PyErr_Format(PyExc_ValueError, "%zu descriptors, but %zd items", b->page_count,
                     PyTuple_GET_SIZE(all));
        failed = -1;
    }
    for (size_t i = 0; !failed && i < b->page_count; i++)
        if (b->pages[i].slot)
            failed = add_item(b, i, PyTuple_GET_ITEM(all, (Py_ssize_t)i));
    Py_DECREF(all);
    const nk_region *at = b->regions;
    for (size_t i = 0; !failed && i < b->page_count; i++) {
        b->pages[i].regions = at;
        at += b->pages[i].region_count;
    }
    return failed;
}

int nk_batch_build(nk_batch *b, PyObject *items)
{
    if (check_limits(b) < 0)
        return -1;
    b->page_count = (size_t)b->descriptors.len / DESCRIPTOR_BYTES;
    b->pages = PyMem_Calloc(b->page_count + 1, sizeof *b->pages);
    b->statuses = PyMem_Calloc(b->page_count + 1, sizeof *b->statuses);
    b->checksums = PyMem_Calloc(b->page_count + 1, sizeof *b->checksums);
    if (!b->pages || !b->statuses || !b->checksums) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < b->page_count; i++) {
        descriptor d = read_descriptor((const uint8_t *)b->descriptors.buf + i * DESCRIPTOR_BYTES);
        if (place_page(b, i, &d, &b->pages[i]) < 0)
            return -1;
    }
    return items ? add_items(b, items) : 0;
}

static void release(Py_buffer *export)
{
    if (export->obj)
        PyBuffer_Release(export);
}

void nk_batch_free(nk_batch *b)
{
    while (b->region_count) {
        release(b->exports[--b->region_count]);
        PyMem_Free(b->exports[b->region_count]);
    }
    PyMem_Free(b->exports);
    PyMem_Free(b->regions);
    PyMem_Free(b->pages);
    PyMem_Free(b->statuses);
    PyMem_Free(b->checksums);
    release(&b->descriptors);
    release(&b->keys);
    release(&b->namespace_id);
}

static int by_address(const void *a, const void *b)
{
    const uint8_t *first = ((const nk_region *)a)->at, *second = ((const nk_region *)b)->at;
    return (first > second) - (first < second);
}

static int neighbours_overlap(const nk_region *regions, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (regions[i].at < regions[i - 1].at + regions[i - 1].length)
            return 1;
    return 0;
}

static int in_segment(const nk_batch *b, const nk_region *r)
{
    uint64_t at = (uint64_t)(uintptr_t)r->at;
    return at < b->segment.address + b->segment.length && b->segment.address < at + r->length;
}

int nk_batch_overlaps(const nk_batch *b)
{
    for (size_t i = 0; i < b->region_count; i++)
        if (in_segment(b, &b->regions[i]))
            return 1;
    if (!neighbours_overlap(b->regions, b->region_count))
        return 0; /* ascending already, as pages cut from one buffer are */
    nk_region *sorted = malloc(b->region_count * sizeof *sorted);
    if (!sorted)
        return 1;
    memcpy(sorted, b->regions, b->region_count * sizeof *sorted);
    qsort(sorted, b->region_count, sizeof *sorted, by_address);
    int overlap = neighbours_overlap(sorted, b->region_count);
    free(sorted);
    return overlap;
}
