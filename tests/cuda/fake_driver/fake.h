/* A CUDA driver without a GPU, for tests: it does to callers what a real one may do.
 *
 * Device memory is a memfd, so a second process can map it. What is nasty on purpose:
 *   - every stream is a thread that sleeps at random before each operation
 *   - the copies of a batch, and the programs of a kernel, run in random order
 *   - a synchronous copy to the device may return before the bytes are there
 *   - the stream checks addresses when it runs, not when it is told to: use after free is error 700,
 *     and that error stays for the whole context
 *   - new memory is full of rubbish; freed memory is overwritten, then made inaccessible; a new
 *     allocation gets the old address and the old IPC handle
 *   - a fabric handle opens only while its exporter holds the allocation, not just a mapping of it
 *   - a handle opens only in another process (by pid value); a second open counts
 *   - everything but cuInit and the device queries needs a context in the calling thread
 *   - nothing works after fork
 * Error codes are those that CUDA's documentation and users report; they are no evidence about CUDA.
 *
 * Environment: FAKE_CUDA_DELAY_US longest sleep; FAKE_CUDA_SEED; FAKE_CUDA_DEVICES how many (2);
 * FAKE_CUDA_VERSION (13000); FAKE_CUDA_FABRIC=1 fabric handles allowed; FAKE_CUDA_NO_P2P=1;
 * FAKE_CUDA_BROKEN_P2P=1 mappings show other bytes; FAKE_CUDA_HOLD=path streams stand still while
 * that file exists; FAKE_CUDA_BYTES memory of a device; CUDA_VISIBLE_DEVICES a list of numbers.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_RANGES 4096
#define UNIT (2ull << 20)
#define PAGE 4096ull

enum Kind { FREE, MALLOC, IPC, MAPPED, HOST };

/* A range of addresses, or a freed place (kind FREE, size != 0) that a new one of its size gets. */
struct Range {
    enum Kind kind;
    CUdeviceptr address;
    size_t size; /* as asked for */
    int device, fd, references;
    ino_t inode;
    unsigned long long buffer_id;
    CUipcMemHandle handle;
    struct Allocation *allocation; /* MAPPED */
    int accessible;                /* MAPPED: after cuMemSetAccess */
};

/* What cuMemCreate makes. */
struct Allocation {
    int fd, device, references, handle_types;
    int handles, fabric_fd; /* of `references`, those that are no mapping; open while there are any */
    size_t size;
};

extern pthread_mutex_t world;
extern int sticky[16];

/* What a stream does, one after the other. */
struct Piece {
    CUdeviceptr dst, src;
    size_t bytes;
};
struct Op {
    enum { COPY, ZERO, GATHER, MARK, WAIT, QUIT } what;
    struct Piece *pieces; /* COPY in random order; freed after the operation */
    size_t count;
    CUdeviceptr table; /* GATHER */
    int vectors;
    void *staged; /* COPY from host memory that is not pinned: its one source; freed after */
    struct Event *event; /* MARK, WAIT */
    unsigned long long until; /* WAIT: how often the event must have been reached */
    struct Op *next;
};
CUresult enqueue(CUstream stream, struct Op op); /* `op` is copied */
CUstream default_stream(void);                  /* for synchronous copies only */
void drain(CUstream stream);

CUresult enter(int needs_context);           /* 0, or why the call must fail */
int current_device(void);                    /* index of the physical device, -1 without context */
struct Range *range_of(CUdeviceptr address); /* with `world` held */
int usable(CUdeviceptr address, size_t n);   /* with `world` held */
struct Range *place(enum Kind kind, size_t size, int fd, int device);
struct Range *adopt(CUdeviceptr address, size_t size);
void withdraw(struct Range *range, int poison);
int start_time(int pid, unsigned long long *ticks);
int physical(CUdevice ordinal);
int visible_count(void);
int ordinal_of(int device);
long number(const char *name, long otherwise);
unsigned random_below(unsigned n);
size_t size_up(size_t size, size_t unit);
