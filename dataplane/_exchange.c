/* exchange(): send whole frames on a stream socket, then receive one, without the GIL.
 *
 * The socket may be blocking or not: every call says MSG_DONTWAIT and waits in ppoll with the time
 * that is left. Only the bytes of the one frame are taken from the socket.
 */
#define _GNU_SOURCE
#include "_python.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define PREFIX_BYTES 4
#define VECTORS_A_CALL 1024 /* IOV_MAX of Linux */
#define WAIT_MAX_S 3600.0   /* keeps timespec in range; the loop waits again */

typedef enum { GOING, DONE, INTERRUPTED, TIMED_OUT, CLOSED, FAILED, TOO_LONG, NO_MEMORY } outcome;

typedef struct {
    int fd;
    double deadline_s;
    double spin_s, spin_until_s; /* how long, and until when, a reply is not slept for */
    struct iovec *vectors; /* what is left to send */
    size_t vector_count;
    int send_errno; /* the peer hung up while we sent; its last frame may still be readable */
    uint8_t prefix[PREFIX_BYTES];
    size_t prefix_got;
    uint8_t *payload;
    size_t payload_bytes;
    size_t payload_got;
    size_t payload_bytes_max;
} talk;

static outcome wait_for(talk *t, short events)
{
    double left_s = t->deadline_s - nk_now_s();
    if (!(left_s > 0))
        return TIMED_OUT;
    if (left_s > WAIT_MAX_S)
        left_s = WAIT_MAX_S;
    struct timespec left = {(time_t)left_s, (long)((left_s - (double)(time_t)left_s) * 1e9)};
    struct pollfd entry = {t->fd, events, 0};
    if (ppoll(&entry, 1, &left, NULL) < 0)
        return errno == EINTR ? INTERRUPTED : FAILED;
    return GOING; /* nothing yet is seen by the next try */
}

/* What errno means for the exchange; waits when the socket is not ready. */
static outcome after_error(talk *t, short events)
{
    if (errno == EINTR)
        return INTERRUPTED;
    if (errno == EAGAIN || errno == EWOULDBLOCK)
        return wait_for(t, events);
    return FAILED;
}

static void drop_sent(talk *t, size_t sent)
{
    while (t->vector_count && sent >= t->vectors->iov_len) {
        sent -= t->vectors->iov_len;
        t->vectors++;
        t->vector_count--;
    }
    if (t->vector_count) {
        t->vectors->iov_base = (char *)t->vectors->iov_base + sent;
        t->vectors->iov_len -= sent;
    }
}

static outcome send_all(talk *t)
{
    drop_sent(t, 0);
    while (t->vector_count) {
        struct msghdr message = {0};
        message.msg_iov = t->vectors;
        message.msg_iovlen = t->vector_count < VECTORS_A_CALL ? t->vector_count : VECTORS_A_CALL;
        ssize_t sent = sendmsg(t->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) {
            drop_sent(t, (size_t)sent);
            continue;
        }
        if (errno == EPIPE || errno == ECONNRESET) {
            t->send_errno = errno;
            t->vector_count = 0;
            return DONE;
        }
        outcome after = after_error(t, POLLOUT);
        if (after != GOING)
            return after;
    }
    return DONE;
}

/* Waking a sleeper can cost more than the peer takes to answer. Others get the processor first. */
static int may_spin(const talk *t)
{
    if (!(nk_now_s() < t->spin_until_s))
        return 0;
    sched_yield();
    return 1;
}

static outcome receive_into(talk *t, uint8_t *into, size_t length, size_t *got)
{
    while (*got < length) {
        ssize_t piece = recv(t->fd, into + *got, length - *got, MSG_DONTWAIT);
        if (piece > 0) {
            *got += (size_t)piece;
            continue;
        }
        if (piece == 0)
            return CLOSED;
        if (piece < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && may_spin(t))
            continue;
        outcome after = after_error(t, POLLIN);
        if (after != GOING)
            return after;
    }
    return DONE;
}

static outcome receive_frame(talk *t)
{
    if (t->spin_s > 0) { /* once: from when the request is out */
        t->spin_until_s = fmin(nk_now_s() + t->spin_s, t->deadline_s);
        t->spin_s = 0;
    }
    outcome how = receive_into(t, t->prefix, PREFIX_BYTES, &t->prefix_got);
    if (how != DONE)
        return how;
    if (!t->payload) {
        t->payload_bytes = (size_t)t->prefix[0] | (size_t)t->prefix[1] << 8 |
                           (size_t)t->prefix[2] << 16 | (size_t)t->prefix[3] << 24;
        if (t->payload_bytes > t->payload_bytes_max)
            return TOO_LONG;
        t->payload = malloc(t->payload_bytes ? t->payload_bytes : 1);
        if (!t->payload)
            return NO_MEMORY;
    }
    return receive_into(t, t->payload, t->payload_bytes, &t->payload_got);
}

/* Runs without the GIL and may be called again after INTERRUPTED: `t` says how far it came. */
static outcome run(talk *t)
{
    outcome how = send_all(t);
    if (how != DONE)
        return how;
    how = receive_frame(t);
    if ((how == CLOSED || how == FAILED) && t->send_errno) {
        errno = t->send_errno;
        return FAILED;
    }
    return how;
}

static PyObject *result_of(const talk *t, outcome how, int error)
{
    switch (how) {
    case DONE:
        return PyBytes_FromStringAndSize((const char *)t->payload, (Py_ssize_t)t->payload_bytes);
    case TIMED_OUT:
        PyErr_SetString(PyExc_TimeoutError, "no whole reply within the time given");
        return NULL;
    case CLOSED:
        PyErr_Format(PyExc_ConnectionError, "the peer closed the connection after %zu bytes",
                     t->prefix_got + t->payload_got);
        return NULL;
    case TOO_LONG:
        PyErr_Format(PyExc_ValueError, "the peer announces a message of %zu bytes, at most %zu",
                     t->payload_bytes, t->payload_bytes_max);
        return NULL;
    case NO_MEMORY:
        return PyErr_NoMemory();
    default:
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
}

static PyObject *talk_until_done(talk *t)
{
    for (;;) {
        outcome how;
        int error;
        Py_BEGIN_ALLOW_THREADS
        how = run(t);
        error = errno;
        Py_END_ALLOW_THREADS
        if (how != INTERRUPTED)
            return result_of(t, how, error);
        if (PyErr_CheckSignals() < 0)
            return NULL;
    }
}

/* `request` as a tuple of buffers. */
static PyObject *as_parts(PyObject *request)
{
    return PyObject_CheckBuffer(request) ? PyTuple_Pack(1, request) : PySequence_Tuple(request);
}

static PyObject *talk_in_parts(talk *t, PyObject *parts)
{
    size_t count = (size_t)PyTuple_GET_SIZE(parts), held = 0;
    PyObject *reply = NULL;
    Py_buffer *exports = PyMem_Calloc(count + 1, sizeof *exports);
    struct iovec *vectors = PyMem_Calloc(count + 1, sizeof *vectors);
    if (!exports || !vectors) {
        PyErr_NoMemory();
        goto out;
    }
    for (; held < count; held++) {
        PyObject *part = PyTuple_GET_ITEM(parts, (Py_ssize_t)held);
        if (PyObject_GetBuffer(part, &exports[held], PyBUF_SIMPLE) < 0)
            goto out;
        vectors[held].iov_base = exports[held].buf;
        vectors[held].iov_len = (size_t)exports[held].len;
    }
    t->vectors = vectors;
    t->vector_count = count;
    reply = talk_until_done(t);
    free(t->payload);
out:
    while (held)
        PyBuffer_Release(&exports[--held]);
    PyMem_Free(vectors);
    PyMem_Free(exports);
    return reply;
}

PyObject *nk_exchange(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"fd", "request", "message_bytes_max", "timeout_s", "spin_s", NULL};
    talk t = {0};
    PyObject *request;
    Py_ssize_t payload_bytes_max = -1;
    double timeout_s = NAN;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO|$ndd:exchange", names, &t.fd, &request,
                                     &payload_bytes_max, &timeout_s, &t.spin_s))
        return NULL;
    if (payload_bytes_max < 0 || isnan(timeout_s) || isnan(t.spin_s)) {
        PyErr_SetString(PyExc_ValueError, "message_bytes_max is negative or a time no number");
        return NULL;
    }
    t.payload_bytes_max = (size_t)payload_bytes_max;
    t.deadline_s = nk_now_s() + timeout_s;
    PyObject *parts = as_parts(request);
    if (!parts)
        return NULL;
    PyObject *reply = talk_in_parts(&t, parts);
    Py_DECREF(parts);
    return reply;
}
