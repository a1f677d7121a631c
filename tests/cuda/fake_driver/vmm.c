/* cuMemCreate and what goes with it. A descriptor keeps the memory; a fabric handle does not. */
#include "fake.h"

#define ENTER(needs_context)                     \
    do {                                         \
        CUresult refused = enter(needs_context); \
        if (refused) return refused;             \
    } while (0)

struct Fabric {
    uint32_t magic;
    int32_t pid, fd;
    uint64_t start, size;
};
#define FABRIC_MAGIC 0xcdaa0008u

static struct Allocation *made(int fd, size_t size, int device, int handle_types) {
    struct Allocation *allocation = calloc(1, sizeof *allocation);
    *allocation = (struct Allocation){.fd = fd, .device = device, .references = 1, .handles = 1,
                                      .fabric_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3),
                                      .handle_types = handle_types, .size = size};
    return allocation;
}

static void drop(struct Allocation *allocation) {
    if (--allocation->references) return;
    close(allocation->fd);
    free(allocation);
}

static void drop_handle(struct Allocation *allocation) {
    if (--allocation->handles == 0) close(allocation->fabric_fd);
    drop(allocation);
}

CUresult cuMemGetAllocationGranularity(size_t *unit, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags flag) {
    (void)properties, (void)flag;
    *unit = UNIT;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    ENTER(0);
    int types = (int)properties->requestedHandleTypes;
    if (flags || !size || size % UNIT) return CUDA_ERROR_INVALID_VALUE;
    if (types & CU_MEM_HANDLE_TYPE_FABRIC && !number("FAKE_CUDA_FABRIC", 0)) return CUDA_ERROR_NOT_PERMITTED;
    int fd = memfd_create("fake-cuda-vmm", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (CUmemGenericAllocationHandle)made(fd, size, physical(properties->location.id), types);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(0);
    pthread_mutex_lock(&world);
    drop_handle((struct Allocation *)handle);
    pthread_mutex_unlock(&world);
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER(0);
    pthread_mutex_lock(&world);
    struct Range *range = range_of((CUdeviceptr)address);
    int mapped = range && range->kind == MAPPED;
    if (mapped) {
        struct Allocation *allocation = range->allocation;
        allocation->references++;
        if (allocation->handles++ == 0) allocation->fabric_fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 3);
        *handle = (CUmemGenericAllocationHandle)range->allocation;
    }
    pthread_mutex_unlock(&world);
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(0);
    struct Allocation *allocation = (struct Allocation *)handle;
    if (flags || !((int)type & allocation->handle_types)) return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        *(int *)out = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 3);
        return CUDA_SUCCESS;
    }
    struct Fabric fabric = {FABRIC_MAGIC, getpid(), allocation->fabric_fd, 0, allocation->size};
    unsigned long long start = 0;
    start_time(getpid(), &start);
    fabric.start = start;
    memset(out, 0, 64);
    memcpy(out, &fabric, sizeof fabric);
    return CUDA_SUCCESS;
}

static int from_fabric(const void *raw) {
    struct Fabric fabric;
    char path[64];
    unsigned long long start;
    memcpy(&fabric, raw, sizeof fabric);
    if (fabric.magic != FABRIC_MAGIC || !start_time(fabric.pid, &start) || start != fabric.start) return -1;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", fabric.pid, fabric.fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *os_handle,
                                        CUmemAllocationHandleType type) {
    ENTER(0);
    int descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    int fd = descriptor ? fcntl((int)(uintptr_t)os_handle, F_DUPFD_CLOEXEC, 3) : from_fabric(os_handle);
    struct stat status;
    if (fd < 0 || fstat(fd, &status)) return CUDA_ERROR_INVALID_VALUE;
    *out = (CUmemGenericAllocationHandle)made(fd, (size_t)status.st_size, -1, 0);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    ENTER(0);
    (void)alignment;
    if (wanted || flags || size % UNIT) return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap(NULL, size + UNIT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = size_up((size_t)at, UNIT);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER(0);
    pthread_mutex_lock(&world);
    struct Range *range = range_of(address);
    pthread_mutex_unlock(&world);
    (void)size; /* The addresses stay taken, so that a late use is a crash and never other data. */
    return range ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    ENTER(0);
    struct Allocation *allocation = (struct Allocation *)handle;
    if (offset || flags || size != allocation->size) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&world);
    struct Range *range = range_of(address) ? NULL : adopt(address, size);
    if (range) {
        allocation->references++;
        range->allocation = allocation;
        range->device = allocation->device;
    }
    pthread_mutex_unlock(&world);
    return range ? CUDA_SUCCESS : CUDA_ERROR_ALREADY_MAPPED;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER(0);
    if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&world);
    struct Range *range = range_of(address);
    int good = range && range->kind == MAPPED && range->size == size &&
               mmap((void *)address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                    range->allocation->fd, 0) != MAP_FAILED;
    if (good) range->accessible = 1;
    pthread_mutex_unlock(&world);
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER(0);
    pthread_mutex_lock(&world);
    struct Range *range = range_of(address);
    int good = range && range->kind == MAPPED && range->address == address && range->size == size;
    if (good) {
        drop(range->allocation);
        withdraw(range, 0);
        range->address = 0; /* reserved by the caller, not for `place` to give away */
    }
    pthread_mutex_unlock(&world);
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
