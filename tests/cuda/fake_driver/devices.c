/* Start, devices, contexts, errors, and which function has which name. */
#include "fake.h"
#include <dlfcn.h>

int sticky[16];
static pid_t home;
static __thread int stack[64], depth; /* devices of the pushed contexts */

long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

unsigned random_below(unsigned n) {
    static __thread unsigned state;
    if (!state) state = (unsigned)number("FAKE_CUDA_SEED", 1) * 2654435761u + (unsigned)getpid() + 1;
    return n ? (unsigned)rand_r(&state) % n : 0;
}

size_t size_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static int visible(int *list) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    int total = (int)number("FAKE_CUDA_DEVICES", 2), n = 0;
    if (!text) {
        for (; n < total; n++) list[n] = n;
        return n;
    }
    while (*text >= '0' && *text <= '9' && n < 16) {
        int device = (int)strtol(text, (char **)&text, 10);
        if (device >= total) break;
        list[n++] = device;
        if (*text == ',') text++;
    }
    return n;
}

int visible_count(void) {
    int list[16];
    return visible(list);
}

int physical(CUdevice ordinal) {
    int list[16], n = visible(list);
    return ordinal >= 0 && ordinal < n ? list[ordinal] : -1;
}

int ordinal_of(int device) {
    int list[16], n = visible(list);
    for (int i = 0; i < n; i++)
        if (list[i] == device) return i;
    return -1;
}

int current_device(void) { return depth ? stack[depth - 1] : -1; }

CUresult enter(int needs_context) {
    if (!home || home != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!needs_context) return CUDA_SUCCESS;
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    return (CUresult)sticky[current_device()];
}

#define ENTER(needs_context)                     \
    do {                                         \
        CUresult refused = enter(needs_context); \
        if (refused) return refused;             \
    } while (0)

CUresult cuInit(unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (home && home != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!visible_count()) return CUDA_ERROR_NO_DEVICE;
    home = getpid();
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = (int)number("FAKE_CUDA_VERSION", 13000);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER(0);
    *count = visible_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(0);
    *device = ordinal;
    return physical(ordinal) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(0);
    snprintf(name, (size_t)length, "pdnode fake device (host memory) %d", physical(device));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(0);
    if (physical(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid->bytes, "pdnode-fake-gpu", 15);
    uuid->bytes[15] = (char)physical(device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    ENTER(0);
    snprintf(text, (size_t)length, "0000:%02x:00.0", 16 + physical(device));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER(0);
    if (physical(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER(0);
    if (physical(device) < 0 || physical(peer) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer && !number("FAKE_CUDA_NO_P2P", 0);
    return CUDA_SUCCESS;
}

/* A context is its device plus one, as a pointer. */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(0);
    if (physical(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *context = (CUcontext)(uintptr_t)(physical(device) + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(0);
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == 64) return CUDA_ERROR_OUT_OF_MEMORY;
    stack[depth++] = (int)(uintptr_t)context - 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER(0);
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    *context = (CUcontext)(uintptr_t)(stack[--depth] + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(0);
    *context = (CUcontext)(uintptr_t)(current_device() + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(1);
    *device = ordinal_of(current_device());
    return CUDA_SUCCESS;
}

/* Not RTLD_DEFAULT: the library may have been loaded for one caller only. */
static void *here(void) {
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)here, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    return self;
}

/* Newer ABIs have the suffix _v2 in the library; which one a caller gets depends on the version it
 * asks for. The fake has one ABI of each function but for the batch copy, where there are two. */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *found) {
    char newer[128];
    int batch = !strcmp(symbol, "cuMemcpyBatchAsync");
    int driver = (int)number("FAKE_CUDA_VERSION", 13000);
    (void)flags;
    snprintf(newer, sizeof newer, "%s_v2", symbol);
    *function = NULL;
    if (!batch || (version >= 13000 && driver >= 13000)) *function = dlsym(here(), newer);
    if (!*function && !(batch && driver < 12080)) *function = dlsym(here(), symbol);
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
