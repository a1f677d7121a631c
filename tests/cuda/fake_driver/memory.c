/* Addresses; cuMemAlloc and legacy IPC. */
#include "fake.h"

#define ENTER()                      \
    do {                             \
        CUresult refused = enter(1); \
        if (refused) return refused; \
    } while (0)

/* 64 bytes that name a descriptor of a living process: gone with it, and the same again when the
 * process frees memory and allocates as much. */
struct Handle {
    uint32_t magic;
    int32_t pid, fd, device;
    uint64_t start, address, size;
};
#define HANDLE_MAGIC 0xcdaa0001u

pthread_mutex_t world = PTHREAD_MUTEX_INITIALIZER;
static struct Range ranges[MAX_RANGES];
static size_t used;
static unsigned long long serial;

struct Range *range_of(CUdeviceptr address) {
    for (size_t i = 0; i < used; i++) {
        struct Range *range = &ranges[i];
        if (range->kind != FREE && address >= range->address && address < range->address + range->size)
            return range;
    }
    return NULL;
}

int usable(CUdeviceptr address, size_t n) {
    struct Range *range = range_of(address);
    if (!range || (range->kind == MAPPED && !range->accessible)) return 0;
    if (address + n <= range->address + range->size) return 1;
    size_t here = range->address + range->size - address; /* a neighbour may go on where it ends */
    return range->kind == MAPPED && usable(address + here, n - here);
}

/* The place that was freed last gets the next range of its size. */
static struct Range *slot(size_t size) {
    for (size_t i = used; i-- > 0;)
        if (ranges[i].kind == FREE && ranges[i].address && size_up(ranges[i].size, UNIT) == size_up(size, UNIT))
            return &ranges[i];
    if (used == MAX_RANGES) return NULL;
    struct Range *fresh = &ranges[used];
    void *at = mmap(NULL, size_up(size, UNIT) + UNIT, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return NULL;
    used++;
    fresh->address = size_up((size_t)at, UNIT);
    return fresh;
}

struct Range *place(enum Kind kind, size_t size, int fd, int device) {
    struct Range *range = slot(size);
    if (!range) return NULL;
    if (fd >= 0 && mmap((void *)range->address, size_up(size, PAGE), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return NULL;
    *range = (struct Range){.kind = kind, .address = range->address, .size = size, .device = device,
                            .fd = fd, .references = 1, .buffer_id = ++serial};
    return range;
}

/* For cuMemMap: the caller has reserved the address. */
struct Range *adopt(CUdeviceptr address, size_t size) {
    size_t i = 0;
    while (i < used && (ranges[i].kind != FREE || ranges[i].address)) i++;
    if (i == MAX_RANGES) return NULL;
    used += i == used;
    ranges[i] = (struct Range){.kind = MAPPED, .address = address, .size = size, .fd = -1,
                               .buffer_id = ++serial};
    return &ranges[i];
}

void withdraw(struct Range *range, int poison) {
    void *at = (void *)range->address;
    if (poison) memset(at, 0xdd, range->size); /* what a peer that still maps it gets to see */
    mmap(at, size_up(range->size, UNIT), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
         -1, 0);
    if (range->fd >= 0) close(range->fd);
    range->kind = FREE;
    range->fd = -1;
}

static size_t allocated(int device) {
    size_t sum = 0;
    for (size_t i = 0; i < used; i++)
        if (ranges[i].kind == MALLOC && ranges[i].device == device) sum += ranges[i].size;
    return sum;
}

CUresult cuMemGetInfo(size_t *free, size_t *total) {
    ENTER();
    *total = (size_t)number("FAKE_CUDA_BYTES", 8l << 30);
    pthread_mutex_lock(&world);
    *free = *total - allocated(current_device());
    pthread_mutex_unlock(&world);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t size) {
    size_t free, total;
    CUresult refused = cuMemGetInfo(&free, &total);
    if (refused) return refused;
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    if (size > free) return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size_up(size, PAGE))) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&world);
    struct Range *range = place(MALLOC, size, fd, current_device());
    if (range) memset((void *)(*address = range->address), 0xa5, size);
    pthread_mutex_unlock(&world);
    return range ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult release(CUdeviceptr address, enum Kind kind) {
    ENTER();
    pthread_mutex_lock(&world);
    struct Range *range = range_of(address);
    CUresult result = CUDA_SUCCESS;
    if (!range || range->kind != kind || range->address != address)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (--range->references == 0)
        withdraw(range, kind == MALLOC);
    pthread_mutex_unlock(&world);
    return result;
}

CUresult cuMemFree(CUdeviceptr address) { return release(address, MALLOC); }

CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return release(address, IPC); }

CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    ENTER();
    (void)flags;
    int fd = memfd_create("fake-cuda-host", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size_up(size, PAGE))) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&world);
    struct Range *range = place(HOST, size, fd, current_device());
    if (range) *address = (void *)range->address;
    pthread_mutex_unlock(&world);
    return range ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void *address) { return release((CUdeviceptr)address, HOST); }

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER();
    pthread_mutex_lock(&world);
    struct Range *range = range_of(address);
    if (range) *base = range->address, *size = range->size;
    pthread_mutex_unlock(&world);
    return range ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static unsigned long long attribute_of(const struct Range *range, CUpointer_attribute attribute) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return range->kind == HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        return range->buffer_id;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return (unsigned)ordinal_of(range->device);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        return range->kind == MALLOC;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return range->address;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return range->size;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        return range->kind == MAPPED ? (unsigned)range->allocation->handle_types : 0;
    default:
        return 0;
    }
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER();
    pthread_mutex_lock(&world);
    struct Range *range = range_of(address);
    unsigned long long value = range ? attribute_of(range, attribute) : 0;
    pthread_mutex_unlock(&world);
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    int wide = attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID || attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE ||
               attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR ||
               attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES;
    int narrow = attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    memcpy(data, &value, wide ? 8 : narrow ? 1 : 4);
    return CUDA_SUCCESS;
}

int start_time(int pid, unsigned long long *ticks) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    const char *field = strrchr(text, ')');
    for (int i = 0; field && i < 20; i++) field = strchr(field + 1, ' ');
    return field && sscanf(field, "%llu", ticks) == 1;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    ENTER();
    pthread_mutex_lock(&world);
    struct Range *range = range_of(address);
    int capable = range && range->kind == MALLOC;
    struct Handle handle = {.magic = HANDLE_MAGIC, .pid = getpid()};
    if (capable) {
        handle.fd = range->fd, handle.device = range->device;
        handle.address = range->address, handle.size = range->size;
    }
    pthread_mutex_unlock(&world);
    unsigned long long start;
    if (!capable || !start_time(getpid(), &start)) return CUDA_ERROR_INVALID_VALUE;
    handle.start = start;
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

/* The exporter's descriptor, as long as the exporter lives. */
static int reopen(const struct Handle *handle) {
    char path[64];
    unsigned long long start;
    if (!start_time(handle->pid, &start) || start != handle->start) return -1;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (fd >= 0 && (fstat(fd, &status) || (uint64_t)status.st_size < handle->size)) {
        close(fd);
        return -1;
    }
    return fd;
}

static struct Range *opened(const CUipcMemHandle *handle) {
    for (size_t i = 0; i < used; i++)
        if (ranges[i].kind == IPC && !memcmp(&ranges[i].handle, handle, sizeof *handle)) return &ranges[i];
    return NULL;
}

static CUresult open_locked(CUdeviceptr *address, const CUipcMemHandle *raw, const struct Handle *handle, int fd) {
    struct stat status;
    fstat(fd, &status);
    struct Range *known = opened(raw);
    if (known) {
        close(fd);
        if (known->inode != status.st_ino) return CUDA_ERROR_ALREADY_MAPPED;
        known->references++;
        *address = known->address;
        return CUDA_SUCCESS;
    }
    if (number("FAKE_CUDA_BROKEN_P2P", 0)) {
        close(fd);
        fd = memfd_create("fake-cuda-broken", MFD_CLOEXEC);
        if (ftruncate(fd, (off_t)size_up(handle->size, PAGE))) return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct Range *range = place(IPC, handle->size, fd, handle->device);
    if (!range) return CUDA_ERROR_MAP_FAILED;
    range->inode = status.st_ino;
    range->handle = *raw;
    *address = range->address;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle raw, unsigned flags) {
    ENTER();
    struct Handle handle;
    memcpy(&handle, &raw, sizeof handle);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.magic != HANDLE_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if (handle.device != current_device() && number("FAKE_CUDA_NO_P2P", 0))
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    int fd = reopen(&handle);
    if (fd < 0) return CUDA_ERROR_MAP_FAILED;
    pthread_mutex_lock(&world);
    CUresult result = open_locked(address, &raw, &handle, fd);
    pthread_mutex_unlock(&world);
    return result;
}
