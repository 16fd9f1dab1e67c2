/* load(), store(), check(): one pass over a batch of pages without the GIL, on one thread or more.
 *
 * The order inside a page is the contract. load: copy, hash what was copied, and only then read the
 * slot's generation, so a slot that was given away during the copy is seen as stale.
 */
#define _GNU_SOURCE
#include "_batch.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "checksums are handed out as they lie");

static uint64_t mix_of(const nk_batch *b, size_t i)
{
    uint8_t identity[NK_ID_BYTES_MAX + NK_KEY_BYTES_MAX];
    size_t id_bytes = (size_t)b->namespace_id.len;
    memcpy(identity, b->namespace_id.buf, id_bytes);
    memcpy(identity + id_bytes, (const uint8_t *)b->keys.buf + i * b->key_bytes, b->key_bytes);
    return b->kernel->hash(identity, id_bytes + b->key_bytes);
}

static uint8_t load_page(const nk_batch *b, const nk_page *page, uint64_t mix)
{
    uint64_t hash = b->kernel->load(page->slot, page->regions, page->region_count);
    atomic_thread_fence(memory_order_acquire); /* the page's bytes were read before this */
    if (__atomic_load_n(page->generation_now, __ATOMIC_ACQUIRE) != page->generation)
        return NK_STALE;
    return (hash ^ mix) == page->checksum ? NK_HIT : NK_CORRUPT;
}

static uint8_t run_page(nk_batch *b, size_t i)
{
    const nk_page *page = &b->pages[i];
    if (!page->slot)
        return NK_MISS;
    if (nk_now_s() >= b->deadline_s)
        return NK_UNAVAILABLE;
    uint64_t mix = mix_of(b, i);
    if (b->action == NK_LOAD)
        return load_page(b, page, mix);
    if (b->action == NK_STORE) {
        b->checksums[i] = mix ^ b->kernel->store(page->slot, page->regions, page->region_count);
        return NK_STORED;
    }
    return (b->kernel->hash(page->slot, page->size) ^ mix) == page->checksum ? NK_HIT : NK_CORRUPT;
}

static void *run_pages(void *argument)
{
    nk_batch *b = argument;
    size_t i;
    while ((i = atomic_fetch_add_explicit(&b->next, 1, memory_order_relaxed)) < b->page_count)
        b->statuses[i] = run_page(b, i);
    return NULL;
}

/* This thread works too; a thread that cannot be started is done without. */
static void run_batch(nk_batch *b)
{
    pthread_t others[NK_THREADS_MAX];
    size_t wanted = (size_t)b->threads < b->page_count ? (size_t)b->threads : b->page_count;
    size_t started = 0;
    if (wanted > 1) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the interpreter's threads */
        while (started + 1 < wanted && !pthread_create(&others[started], NULL, run_pages, b))
            started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    run_pages(b);
    while (started)
        pthread_join(others[--started], NULL);
}

/* 0, or -1 with an exception set and nothing copied. */
static int run_without_gil(nk_batch *b, PyObject *items)
{
    int overlap;
    b->kernel = nk_kernel_best();
    if (nk_batch_build(b, items) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    overlap = b->action == NK_LOAD && nk_batch_overlaps(b);
    if (!overlap)
        run_batch(b);
    Py_END_ALLOW_THREADS
    if (overlap)
        PyErr_SetString(PyExc_ValueError, "destinations overlap each other or the segment");
    return overlap ? -1 : 0;
}

static PyObject *statuses_of(const nk_batch *b)
{
    return PyBytes_FromStringAndSize((const char *)b->statuses, (Py_ssize_t)b->page_count);
}

PyObject *nk_load(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"segment", "table", "pages", "into", "threads", "deadline_s", NULL};
    nk_batch b = {.action = NK_LOAD, .threads = 1, .deadline_s = INFINITY};
    nk_segment *s = &b.segment;
    nk_table *t = &b.table;
    PyObject *into, *statuses = NULL;
    Py_ssize_t key_bytes = 0;
    if (PyArg_ParseTupleAndKeywords(
            args, kwargs, "(O&O&O&)(O&O&O&O&O&O&)(y*y*ny*)O|$id:load", names, nk_as_u64,
            &s->segment_id, nk_as_u64, &s->address, nk_as_u64, &s->length, nk_as_u64, &t->address,
            nk_as_u64, &t->length, nk_as_u64, &t->chunk_bytes, nk_as_u64, &t->header_bytes,
            nk_as_u64, &t->record_bytes, nk_as_u64, &t->generation_offset, &b.descriptors, &b.keys,
            &key_bytes, &b.namespace_id, &into, &b.threads, &b.deadline_s)) {
        b.key_bytes = (size_t)key_bytes;
        if (run_without_gil(&b, into) == 0)
            statuses = statuses_of(&b);
    }
    nk_batch_free(&b);
    return statuses;
}

PyObject *nk_store(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"segment", "pages", "from_", "threads", "deadline_s", NULL};
    nk_batch b = {.action = NK_STORE, .threads = 1, .deadline_s = INFINITY};
    nk_segment *s = &b.segment;
    PyObject *from, *stored = NULL;
    Py_ssize_t key_bytes = 0;
    if (PyArg_ParseTupleAndKeywords(args, kwargs, "(O&O&O&)(y*y*ny*)O|$id:store", names, nk_as_u64,
                                    &s->segment_id, nk_as_u64, &s->address, nk_as_u64, &s->length,
                                    &b.descriptors, &b.keys, &key_bytes, &b.namespace_id, &from,
                                    &b.threads, &b.deadline_s)) {
        b.key_bytes = (size_t)key_bytes;
        if (run_without_gil(&b, from) == 0)
            stored = Py_BuildValue("(Ny#)", statuses_of(&b), b.checksums,
                                   (Py_ssize_t)(b.page_count * sizeof *b.checksums));
    }
    nk_batch_free(&b);
    return stored;
}

PyObject *nk_check(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"segment", "pages", "threads", "deadline_s", NULL};
    nk_batch b = {.action = NK_CHECK, .threads = 1, .deadline_s = INFINITY};
    nk_segment *s = &b.segment;
    PyObject *statuses = NULL;
    Py_ssize_t key_bytes = 0;
    if (PyArg_ParseTupleAndKeywords(args, kwargs, "(O&O&O&)(y*y*ny*)|$id:check", names, nk_as_u64,
                                    &s->segment_id, nk_as_u64, &s->address, nk_as_u64, &s->length,
                                    &b.descriptors, &b.keys, &key_bytes, &b.namespace_id,
                                    &b.threads, &b.deadline_s)) {
        b.key_bytes = (size_t)key_bytes;
        if (run_without_gil(&b, NULL) == 0)
            statuses = statuses_of(&b);
    }
    nk_batch_free(&b);
    return statuses;
}
