/* SPDX-License-Identifier: Apache-2.0 */
/* What kvpush asks of the CUDA driver, over host memory. Signatures as in cuda.h. A copy is done at once. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t CUdeviceptr;
typedef struct CUstream_st *CUstream;
typedef int CUresult;

typedef struct CUctx_st *CUcontext;

static size_t pinned;
static __thread CUcontext current; /* a thread has none until it is given one */
static int destroyed;
static uintptr_t last_stream;
static unsigned last_flags;

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t num_bytes, CUstream stream) {
    last_stream = (uintptr_t)stream;
    if (!dst || !src) return 1;
    memcpy((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, num_bytes);
    return 0;
}

CUresult cuMemHostAlloc(void **out, size_t num_bytes, unsigned flags) {
    last_flags = flags;
    if (!current) return 201;
    if (num_bytes > (size_t)1 << 40) return 2;
    *out = malloc(num_bytes);
    pinned++;
    return 0;
}

CUresult cuMemFreeHost(void *memory) {
    if (!current) return 201;
    free(memory);
    pinned--;
    return 0;
}

CUresult cuCtxGetCurrent(CUcontext *out) {
    *out = current;
    return 0;
}

/* One deep is enough here. */
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (destroyed) return 709;
    current = context;
    return 0;
}

CUresult cuCtxPopCurrent_v2(CUcontext *out) {
    *out = current;
    current = NULL;
    return 0;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : error == 709 ? "CUDA_ERROR_CONTEXT_IS_DESTROYED" : error == 1 ? "CUDA_ERROR_INVALID_VALUE" : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *name ? 0 : 1;
}

void mock_set_current(void *context) { current = context; }
void mock_destroy(void) { destroyed = 1; }
size_t mock_pinned(void) { return pinned; }
uintptr_t mock_last_stream(void) { return last_stream; }
unsigned mock_last_flags(void) { return last_flags; }
