/* nexuskv.dataplane._native: the module's table. What each function does is in _native.pyi.
 *
 * Every function is stateless, checks everything before a byte moves, gives the GIL up at most once
 * for the whole batch, and holds the buffers it was given until it returns.
 */
#include "_python.h"

#include "_native.h"

const nk_kernel *nk_kernel_best(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        return &nk_kernel_avx2;
#endif
    return &nk_kernel_base;
}

int nk_as_u64(PyObject *number, void *into)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError))
            PyErr_Format(PyExc_ValueError, "%R does not fit into 64 bits without a sign", number);
        return 0;
    }
    *(uint64_t *)into = value;
    return 1;
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"exchange", KEYWORDS(nk_exchange), "Send frames, then receive one frame's payload."},
    {"load", KEYWORDS(nk_load), "Copy pages out of a segment, hashing where they land."},
    {"store", KEYWORDS(nk_store), "Hash pages and copy them into a segment."},
    {"check", KEYWORDS(nk_check), "Hash pages in place."},
    {"populate", KEYWORDS(nk_populate), "Fill the page tables of a mapping."},
    {"touch", KEYWORDS(nk_touch), "populate() for kernels without MADV_POPULATE_*."},
    {"advise_huge", nk_advise_huge, METH_VARARGS, "Ask for transparent huge pages."},
    {"address_of", nk_address_of, METH_VARARGS, "Where a buffer's bytes lie."},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module)
{
    return PyModule_AddStringConstant(module, "INSTRUCTION_SET", nk_kernel_best()->name);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "nexuskv.dataplane._native",
    .m_doc = "Moving bytes without the GIL.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
