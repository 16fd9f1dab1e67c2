/* populate(), touch(), advise_huge(), address_of(): page tables of mappings, without the GIL. */
#define _GNU_SOURCE
#include "_python.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define SMALL_PAGE_BYTES ((size_t)4096)
#define TOUCHES_A_CALL 1024 /* IOV_MAX of Linux */

/* In steps, so that the lock on the address space is let go for page faults in between. */
#define POPULATE_STEP_BYTES ((size_t)4 * 1024 * 1024)

static size_t step_of(size_t left, size_t step_max)
{
    return left < step_max ? left : step_max;
}

/* The kernel reads one byte of every page for us: it answers EFAULT where we would get a SIGBUS. */
static int probe(uint8_t *at, size_t pages)
{
    uint8_t sink[TOUCHES_A_CALL];
    struct iovec local = {sink, pages}, remote[TOUCHES_A_CALL];
    for (size_t i = 0; i < pages; i++)
        remote[i] = (struct iovec){at + i * SMALL_PAGE_BYTES, 1};
    ssize_t got = process_vm_readv(getpid(), &local, 1, remote, pages, 0);
    if (got < 0)
        return errno;
    return (size_t)got == pages ? 0 : EFAULT;
}

static int touch(uint8_t *at, size_t length, int write)
{
    for (size_t done = 0; done < length;) {
        size_t step = step_of(length - done, TOUCHES_A_CALL * SMALL_PAGE_BYTES);
        int error = probe(at + done, (step + SMALL_PAGE_BYTES - 1) / SMALL_PAGE_BYTES);
        if (error)
            return error;
        for (size_t i = 0; write && i < step; i += SMALL_PAGE_BYTES)
            __atomic_fetch_or(at + done + i, 0, __ATOMIC_RELAXED); /* writes, changes nothing */
        done += step;
    }
    return 0;
}

static int populate(uint8_t *at, size_t length, int write)
{
    int advice = write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    for (size_t done = 0; done < length;) {
        size_t step = step_of(length - done, POPULATE_STEP_BYTES);
        if (madvise(at + done, step, advice) == 0)
            done += step;
        else if (errno == EINVAL)
            return touch(at + done, length - done, write); /* before Linux 5.14 */
        else if (errno != EINTR && errno != EAGAIN)
            return errno;
    }
    return 0;
}

/* Page-aligned, not empty, not past the end of the address space. */
static int check_range(uint64_t address, uint64_t length)
{
    if (address && length && address % SMALL_PAGE_BYTES == 0 && address + length > address)
        return 1;
    PyErr_Format(PyExc_ValueError, "range of %llu bytes at %llu is empty or not page-aligned",
                 (unsigned long long)length, (unsigned long long)address);
    return 0;
}

static PyObject *fill(PyObject *args, PyObject *kwargs, int (*how)(uint8_t *, size_t, int))
{
    static char *names[] = {"address", "length", "write", NULL};
    uint64_t address, length;
    int write = 0, error;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&$p", names, nk_as_u64, &address, nk_as_u64,
                                     &length, &write) ||
        !check_range(address, length))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = how((uint8_t *)(uintptr_t)address, (size_t)length, write);
    Py_END_ALLOW_THREADS
    if (!error)
        Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyObject *nk_populate(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    return fill(args, kwargs, populate);
}

PyObject *nk_touch(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    return fill(args, kwargs, touch);
}

PyObject *nk_advise_huge(PyObject *module, PyObject *args)
{
    (void)module;
    uint64_t address, length;
    int failed;
    if (!PyArg_ParseTuple(args, "O&O&:advise_huge", nk_as_u64, &address, nk_as_u64, &length) ||
        !check_range(address, length))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = madvise((void *)(uintptr_t)address, (size_t)length, MADV_HUGEPAGE);
    Py_END_ALLOW_THREADS
    if (failed)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

PyObject *nk_address_of(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object;
    Py_buffer export;
    if (!PyArg_ParseTuple(args, "O:address_of", &object) ||
        PyObject_GetBuffer(object, &export, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *address = PyLong_FromVoidPtr(export.buf);
    PyBuffer_Release(&export);
    return address;
}
