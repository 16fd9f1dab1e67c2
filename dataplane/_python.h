/* The Python-facing functions of the module, one group a file, and the time they share. */
#ifndef NK_PYTHON_H
#define NK_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <time.h>

PyObject *nk_exchange(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *nk_load(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *nk_store(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *nk_check(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *nk_populate(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *nk_touch(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *nk_advise_huge(PyObject *module, PyObject *args);
PyObject *nk_address_of(PyObject *module, PyObject *args);

/* Converter for "O&" into a uint64_t: a negative or too large number is a ValueError. */
int nk_as_u64(PyObject *number, void *into);

/* Seconds of CLOCK_MONOTONIC: what time.monotonic() says on Linux. */
static inline double nk_now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

#endif
