/* SPDX-License-Identifier: Apache-2.0
 *
 * Stand-in for libnrt.so.1: device memory in host memory, with what kvpush must get right made visible.
 *
 *   landing   where the network card writes: what nrt_tensor_get_va() gives, and what the card reads
 *   hbm       what the device and nrt_tensor_read() see
 *
 * Bytes that the card has written stay in `landing` until the card itself reads from that allocation (mock_efa_read). A read by
 * the CPU (nrt_tensor_read) moves nothing, as on trn2. Names and signatures are those of nrt/nrt.h.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int NRT_STATUS;
enum { NRT_SUCCESS = 0, NRT_FAILURE = 1, NRT_INVALID = 2, NRT_UNINITIALIZED = 13, NRT_CLOSED = 14 };
enum { STATE_START = 0, STATE_INIT = 1, STATE_CHILD = 2, STATE_CLOSED = 3 };

typedef struct nrt_tensor {
    unsigned char *landing, *hbm;
    size_t size;
    struct nrt_tensor *next;
} nrt_tensor_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static nrt_tensor_t *tensors;
static int state = STATE_START;
static int has_efa = 1;
static int failing_reads;

static NRT_STATUS gate(void) {
    switch (state) {
    case STATE_INIT: return NRT_SUCCESS;
    case STATE_START: return NRT_UNINITIALIZED;
    case STATE_CLOSED: return NRT_CLOSED;
    default: return NRT_FAILURE;
    }
}

static nrt_tensor_t *owner(const void *va, size_t size) {
    for (nrt_tensor_t *t = tensors; t; t = t->next)
        if ((const unsigned char *)va >= t->landing && (const unsigned char *)va + size <= t->landing + t->size) return t;
    return NULL;
}

NRT_STATUS nrt_init(int framework, const char *fw_version, const char *fal_version) {
    (void)framework, (void)fw_version, (void)fal_version;
    if (state != STATE_START && state != STATE_INIT) return gate();
    state = STATE_INIT;
    return NRT_SUCCESS;
}

void nrt_close(void) { state = STATE_CLOSED; }

NRT_STATUS nrt_tensor_allocate_empty(const char *name, nrt_tensor_t **tensor) {
    (void)name;
    if (gate() != NRT_SUCCESS) return gate();
    *tensor = calloc(1, sizeof(nrt_tensor_t));
    return *tensor ? NRT_SUCCESS : NRT_FAILURE;
}

NRT_STATUS nrt_tensor_allocate(int placement, int vnc, size_t size, const char *name, nrt_tensor_t **tensor) {
    (void)placement, (void)vnc;
    NRT_STATUS status = nrt_tensor_allocate_empty(name, tensor);
    if (status != NRT_SUCCESS) return status;
    nrt_tensor_t *t = *tensor;
    t->landing = calloc(1, size), t->hbm = calloc(1, size), t->size = size;
    pthread_mutex_lock(&lock);
    t->next = tensors, tensors = t;
    pthread_mutex_unlock(&lock);
    return NRT_SUCCESS;
}

void nrt_tensor_free(nrt_tensor_t **tensor) {
    pthread_mutex_lock(&lock);
    for (nrt_tensor_t **at = &tensors; *at; at = &(*at)->next)
        if (*at == *tensor) {
            *at = (*tensor)->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    free((*tensor)->landing), free((*tensor)->hbm), free(*tensor);
    *tensor = NULL;
}

/* NULL where HBM is not mapped into the process. */
void *nrt_tensor_get_va(const nrt_tensor_t *tensor) {
    const char *mapped = getenv("NEURON_RT_MAP_HBM");
    return gate() == NRT_SUCCESS && mapped && strcmp(mapped, "1") == 0 ? tensor->landing : NULL;
}

NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *buf, size_t offset, size_t size) {
    if (gate() != NRT_SUCCESS) return gate();
    if (offset > tensor->size || size > tensor->size - offset) return NRT_INVALID;
    pthread_mutex_lock(&lock);
    memcpy(buf, tensor->hbm + offset, size);
    pthread_mutex_unlock(&lock);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *buf, size_t offset, size_t size) {
    if (gate() != NRT_SUCCESS) return gate();
    if (offset > tensor->size || size > tensor->size - offset) return NRT_INVALID;
    pthread_mutex_lock(&lock);
    memcpy(tensor->hbm + offset, buf, size);
    memcpy(tensor->landing + offset, buf, size);
    pthread_mutex_unlock(&lock);
    return NRT_SUCCESS;
}

NRT_STATUS nrt_get_attached_efa_bdf(const void *va, char *efa_bdf, size_t *len) {
    static const char bdf[] = "0000:a1:00.0";
    if (gate() != NRT_SUCCESS) return gate();
    if (!has_efa || !owner(va, 1)) return NRT_FAILURE;
    if (*len < sizeof(bdf)) return 4;
    memcpy(efa_bdf, bdf, sizeof(bdf));
    *len = sizeof(bdf) - 1;
    return NRT_SUCCESS;
}

/* What the network card does: a read of an allocation brings what it has written there into HBM first. */
NRT_STATUS mock_efa_read(void *buf, const void *va, size_t size) {
    if (failing_reads > 0) {
        failing_reads--;
        return NRT_FAILURE;
    }
    pthread_mutex_lock(&lock);
    nrt_tensor_t *t = owner(va, size);
    if (t) {
        memcpy(t->hbm, t->landing, t->size);
        memcpy(buf, va, size);
    }
    pthread_mutex_unlock(&lock);
    return t ? NRT_SUCCESS : NRT_INVALID;
}

void mock_reset(int new_state) { state = new_state, has_efa = 1, failing_reads = 0; }
void mock_set_efa(int there) { has_efa = there; }
void mock_fail_reads(int count) { failing_reads = count; }
