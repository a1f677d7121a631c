/* Streams, each a thread; events; the operations. */
#include "fake.h"

struct Event {
    unsigned long long asked, reached;
    int destroyed, device;
};

struct Stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct Op *first, *last;
    int device;
};

/* Everything is freed late or never: a caller that uses what it destroyed must get an error, not luck. */
static pthread_mutex_t events = PTHREAD_MUTEX_INITIALIZER;

static void dawdle(void) {
    const char *hold = getenv("FAKE_CUDA_HOLD");
    while (hold && *hold && !access(hold, F_OK)) usleep(500);
    unsigned longest = (unsigned)number("FAKE_CUDA_DELAY_US", 200);
    if (longest) usleep(random_below(longest + 1));
}

static void shuffle(struct Piece *pieces, size_t n) {
    for (size_t i = n; i > 1; i--) {
        size_t j = random_below((unsigned)i);
        struct Piece kept = pieces[i - 1];
        pieces[i - 1] = pieces[j];
        pieces[j] = kept;
    }
}

static CUresult move(const struct Piece *piece) {
    if (!usable(piece->dst, piece->bytes) || !usable(piece->src, piece->bytes))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memcpy((void *)piece->dst, (void *)piece->src, piece->bytes);
    return CUDA_SUCCESS;
}

/* cuMemcpyHtoD has taken the bytes from its caller, and here they arrive. */
static CUresult land(const struct Op *op) {
    pthread_mutex_lock(&world);
    int good = usable(op->pieces->dst, op->pieces->bytes);
    if (good) memcpy((void *)op->pieces->dst, op->staged, op->pieces->bytes);
    pthread_mutex_unlock(&world);
    return good ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static CUresult move_all(struct Piece *pieces, size_t count) {
    CUresult result = CUDA_SUCCESS;
    shuffle(pieces, count);
    for (size_t i = 0; i < count && !result; i++) {
        pthread_mutex_lock(&world); /* nothing is unmapped in the middle of one piece */
        result = move(&pieces[i]);
        pthread_mutex_unlock(&world);
        if (count > 1 && !random_below(64)) usleep(random_below(50));
    }
    return result;
}

/* What kernels.py compiles: rows of (source, destination, bytes), read when the kernel runs. */
static CUresult gather(const struct Op *op) {
    size_t row = 3 * sizeof(uint64_t);
    struct Piece *pieces = calloc(op->count + 1, sizeof *pieces);
    pthread_mutex_lock(&world);
    CUresult result = usable(op->table, op->count * row) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
    for (size_t i = 0; i < op->count && !result; i++) {
        const uint64_t *at = (const uint64_t *)(op->table + i * row);
        pieces[i] = (struct Piece){.src = at[0], .dst = at[1], .bytes = at[2]};
        if (op->vectors && (at[0] | at[1] | at[2]) % 16) result = CUDA_ERROR_MISALIGNED_ADDRESS;
    }
    pthread_mutex_unlock(&world);
    if (!result) result = move_all(pieces, op->count);
    free(pieces);
    return result;
}

static CUresult zero(const struct Op *op) {
    pthread_mutex_lock(&world);
    int good = usable(op->pieces->dst, op->pieces->bytes);
    if (good) memset((void *)op->pieces->dst, 0, op->pieces->bytes);
    pthread_mutex_unlock(&world);
    return good ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static void mark(struct Event *event) {
    pthread_mutex_lock(&events);
    event->reached++;
    pthread_mutex_unlock(&events);
}

static void wait_for(struct Event *event, unsigned long long until) {
    for (int over = 0; !over; usleep(20)) {
        pthread_mutex_lock(&events);
        over = event->reached >= until;
        pthread_mutex_unlock(&events);
    }
}

static void perform(struct Stream *stream, struct Op *op) {
    CUresult result = CUDA_SUCCESS;
    if (op->what != MARK && op->what != WAIT) dawdle();
    if (op->what == MARK)
        mark(op->event);
    else if (op->what == WAIT)
        wait_for(op->event, op->until);
    else if (!sticky[stream->device])
        result = op->staged         ? land(op)
                 : op->what == COPY ? move_all(op->pieces, op->count)
                 : op->what == ZERO ? zero(op)
                                    : gather(op);
    if (result) sticky[stream->device] = result;
    free(op->pieces);
    free(op->staged);
    free(op);
}

static void *run(void *argument) {
    struct Stream *stream = argument;
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        while (!stream->first) pthread_cond_wait(&stream->more, &stream->lock);
        struct Op *op = stream->first;
        stream->first = op->next;
        pthread_mutex_unlock(&stream->lock);
        if (op->what == QUIT) return NULL;
        perform(stream, op);
    }
}

CUresult enqueue(CUstream handle, struct Op op) {
    struct Stream *stream = (struct Stream *)handle;
    struct Op *copy = malloc(sizeof *copy);
    *copy = op;
    pthread_mutex_lock(&stream->lock);
    if (stream->first)
        stream->last->next = copy;
    else
        stream->first = copy;
    stream->last = copy;
    pthread_cond_signal(&stream->more);
    pthread_mutex_unlock(&stream->lock);
    return CUDA_SUCCESS;
}

void drain(CUstream stream) {
    struct Event event = {0};
    enqueue(stream, (struct Op){.what = MARK, .event = &event});
    wait_for(&event, 1);
}

CUresult cuStreamSynchronize(CUstream stream) {
    CUresult refused = enter(1);
    if (refused) return refused;
    drain(stream ? stream : default_stream());
    return enter(1);
}

CUstream default_stream(void) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static CUstream streams[16];
    pthread_mutex_lock(&once);
    CUstream *stream = &streams[current_device()];
    if (!*stream) cuStreamCreate(stream, CU_STREAM_NON_BLOCKING);
    pthread_mutex_unlock(&once);
    return *stream;
}

CUresult cuStreamCreate(CUstream *out, unsigned flags) {
    CUresult refused = enter(1);
    if (refused) return refused;
    if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE; /* we never want the other kind */
    struct Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->more, NULL);
    stream->device = current_device();
    if (pthread_create(&stream->thread, NULL, run, stream)) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_detach(stream->thread);
    *out = (CUstream)stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
    CUresult refused = enter(1);
    return refused ? refused : enqueue(stream, (struct Op){.what = QUIT});
}

CUresult cuEventCreate(CUevent *out, unsigned flags) {
    CUresult refused = enter(1);
    (void)flags;
    struct Event *event = calloc(1, sizeof *event);
    event->device = current_device();
    *out = (CUevent)event;
    return refused;
}

static CUresult checked(CUevent handle) {
    CUresult refused = enter(1);
    return refused ? refused : ((struct Event *)handle)->destroyed ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
    CUresult refused = checked(handle);
    if (!refused) ((struct Event *)handle)->destroyed = 1;
    return refused;
}

CUresult cuEventRecord(CUevent handle, CUstream stream) {
    CUresult refused = checked(handle);
    if (refused) return refused;
    struct Event *event = (struct Event *)handle;
    if (!stream) stream = default_stream();
    if (event->device != ((struct Stream *)stream)->device) return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&events);
    event->asked++;
    pthread_mutex_unlock(&events);
    return enqueue(stream, (struct Op){.what = MARK, .event = event});
}

/* Of an event that was never recorded there is nothing to wait for. */
CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned flags) {
    CUresult refused = checked(handle);
    if (refused) return refused;
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    struct Event *event = (struct Event *)handle;
    pthread_mutex_lock(&events);
    unsigned long long asked = event->asked;
    pthread_mutex_unlock(&events);
    return enqueue(stream ? stream : default_stream(), (struct Op){.what = WAIT, .event = event, .until = asked});
}

CUresult cuEventQuery(CUevent handle) {
    CUresult refused = checked(handle);
    if (refused) return refused;
    struct Event *event = (struct Event *)handle;
    pthread_mutex_lock(&events);
    int reached = event->reached == event->asked;
    pthread_mutex_unlock(&events);
    return reached ? enter(1) : CUDA_ERROR_NOT_READY;
}
