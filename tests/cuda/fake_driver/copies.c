/* Copies, the batch in both ABIs, and the one kernel there is. */
#include "fake.h"
#undef cuMemcpyBatchAsync

#define ENTER()                      \
    do {                             \
        CUresult refused = enter(1); \
        if (refused) return refused; \
    } while (0)

static struct Op one(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
    struct Piece *piece = malloc(sizeof *piece);
    *piece = (struct Piece){dst, src, bytes};
    return (struct Op){.what = COPY, .pieces = piece, .count = 1};
}

static int known(CUdeviceptr address, size_t bytes) {
    pthread_mutex_lock(&world);
    int good = usable(address, bytes);
    pthread_mutex_unlock(&world);
    return good;
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    ENTER();
    if (!known(from, bytes)) return CUDA_ERROR_INVALID_VALUE;
    drain(default_stream());
    memcpy(to, (void *)from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    ENTER();
    if (!known(to, bytes)) return CUDA_ERROR_INVALID_VALUE;
    struct Op op = one(to, 0, bytes);
    op.staged = memcpy(malloc(bytes), from, bytes);
    return enqueue(default_stream(), op);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    ENTER();
    return enqueue(stream, one(dst, src, bytes));
}

/* The source must be pinned memory of ours: it is read when the stream gets there. */
CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
    ENTER();
    return enqueue(stream, one(dst, (CUdeviceptr)src, bytes));
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream) {
    ENTER();
    struct Op op = one(dst, 0, bytes);
    op.what = ZERO;
    return value ? CUDA_ERROR_INVALID_VALUE : enqueue(stream, op);
}

static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                      CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_sets, CUstream stream) {
    ENTER();
    if (!count || attribute_sets != 1 || indices[0]) return CUDA_ERROR_INVALID_VALUE;
    if ((uintptr_t)stream <= 2) return CUDA_ERROR_INVALID_VALUE; /* default streams */
    /* With another order a peer's memory may be read before the stream gets there. */
    if (attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) return CUDA_ERROR_INVALID_VALUE;
    struct Piece *pieces = malloc(count * sizeof *pieces);
    for (size_t i = 0; i < count; i++) pieces[i] = (struct Piece){dsts[i], srcs[i], sizes[i]};
    return enqueue(stream, (struct Op){.what = COPY, .pieces = pieces, .count = count});
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_sets,
                            size_t *failed_at, CUstream stream) {
    if (!failed_at) return CUDA_ERROR_INVALID_VALUE;
    *failed_at = SIZE_MAX;
    return batch(dsts, srcs, sizes, count, attributes, indices, attribute_sets, stream);
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                               CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_sets,
                               CUstream stream) {
    return batch(dsts, srcs, sizes, count, attributes, indices, attribute_sets, stream);
}

/* A module is its image; a function is loaded when its name is in the image. Nothing of it is run:
 * the stream does in C what the kernel of that name is meant to do. */
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER();
    const unsigned char *elf = image;
    if (memcmp(elf, "\177ELF\2", 5)) return CUDA_ERROR_INVALID_IMAGE;
    *module = (CUmodule)image;
    uint64_t sections;
    uint16_t size, count;
    memcpy(&sections, elf + 40, 8), memcpy(&size, elf + 58, 2), memcpy(&count, elf + 60, 2);
    size_t total = sections + (size_t)size * count;
    void *kept = malloc(total + sizeof total);
    memcpy(kept, &total, sizeof total);
    memcpy((char *)kept + sizeof total, image, total);
    *module = kept;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER();
    size_t total;
    memcpy(&total, module, sizeof total);
    if (!memmem((char *)module + sizeof total, total, name, strlen(name) + 1)) return CUDA_ERROR_NOT_FOUND;
    int vectors = !strcmp(name, "gather_vectors");
    if (!vectors && strcmp(name, "gather_bytes")) return CUDA_ERROR_NOT_FOUND;
    *function = (CUfunction)(uintptr_t)(vectors ? 2 : 1);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **params,
                        void **extra) {
    ENTER();
    if (!grid_x || !grid_y || grid_y > 65535 || grid_z != 1 || block_x > 1024 || block_y != 1 || block_z != 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (shared > 49152 || (extra && *extra) || (uintptr_t)stream <= 2) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, (struct Op){.what = GATHER, .table = *(CUdeviceptr *)params[0],
                                       .count = (size_t)*(int32_t *)params[1],
                                       .vectors = (uintptr_t)function == 2});
}
