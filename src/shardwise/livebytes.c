/* Live heap bytes of this process, exactly, whichever thread frees them.
 *
 * Put in front of the C allocator by LD_PRELOAD (meter.py compiles it: cc -O2 -shared -fPIC), it counts every block of at least MIN_BYTES (torch's CPU
 * tensors come from posix_memalign). The profiler's own total misses frees on gloo's worker threads. Sizes are malloc_usable_size, so a block counts
 * up to a page more than was asked for. Read through ctypes.CDLL(None).livebytes_peak() and friends.
 *
 * Every door of glibc's allocator is here: a block that came through another one would be taken off without having been put on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Fixed, since a block must be put on and taken off by the same rule. Below it are interpreter objects, not tensors. */
#define MIN_BYTES 4096

static void *(*real_malloc)(size_t);
static void *(*real_calloc)(size_t, size_t);
static void *(*real_realloc)(void *, size_t);
static void *(*real_memalign)(size_t, size_t);
static void (*real_free)(void *);

static _Atomic long long live, peak;

/* dlsym may call calloc before we know the real one: serve those few from here. */
static char early[65536];
static size_t early_used;

static void find_real(void) {
    static _Atomic int started;
    if (atomic_exchange(&started, 1)) return;
    real_calloc = dlsym(RTLD_NEXT, "calloc");
    real_malloc = dlsym(RTLD_NEXT, "malloc");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_memalign = dlsym(RTLD_NEXT, "memalign");
    real_free = dlsym(RTLD_NEXT, "free");
}

static int is_early(void *p) { return (char *)p >= early && (char *)p < early + sizeof early; }

static void *early_alloc(size_t n) {
    n = (n + 15) & ~(size_t)15;
    if (early_used + n > sizeof early) return NULL;
    void *p = early + early_used;
    early_used += n;
    return p;
}

static void add(void *p) {
    if (!p) return;
    size_t n = malloc_usable_size(p);
    if (n < MIN_BYTES) return;
    long long now = atomic_fetch_add(&live, (long long)n) + (long long)n;
    long long high = atomic_load(&peak);
    while (now > high && !atomic_compare_exchange_weak(&peak, &high, now)) {}
}

static void sub(void *p) {
    if (!p) return;
    size_t n = malloc_usable_size(p);
    if (n >= MIN_BYTES) atomic_fetch_sub(&live, (long long)n);
}

void *malloc(size_t n) {
    if (!real_malloc) find_real();
    if (!real_malloc) return early_alloc(n);
    void *p = real_malloc(n);
    add(p);
    return p;
}

void *calloc(size_t a, size_t b) {
    if (!real_calloc) find_real();
    if (!real_calloc) return early_alloc(a * b); /* never given out twice, so still zero */
    void *p = real_calloc(a, b);
    add(p);
    return p;
}

void *realloc(void *p, size_t n) {
    if (!real_realloc) find_real();
    if (is_early(p)) {
        size_t left = (size_t)(early + sizeof early - (char *)p);
        void *q = malloc(n);
        if (q) memcpy(q, p, n < left ? n : left);
        return q;
    }
    sub(p);
    void *q = real_realloc(p, n);
    if (q) add(q);
    else if (n) add(p); /* refused: the old block stays. With n = 0 it was freed, and must not be looked at */
    return q;
}

void *memalign(size_t a, size_t n) {
    if (!real_memalign) find_real();
    void *p = real_memalign(a, n);
    add(p);
    return p;
}

void *aligned_alloc(size_t a, size_t n) { return memalign(a, n); }

void *valloc(size_t n) { return memalign((size_t)sysconf(_SC_PAGESIZE), n); }

void *pvalloc(size_t n) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return memalign(page, (n + page - 1) / page * page);
}

void *reallocarray(void *p, size_t a, size_t b) {
    size_t n;
    if (__builtin_mul_overflow(a, b, &n)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(p, n);
}

int posix_memalign(void **out, size_t a, size_t n) {
    if (a % sizeof(void *) || (a & (a - 1)) || !a) return EINVAL;
    void *p = memalign(a, n);
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

void free(void *p) {
    if (!p || is_early(p)) return;
    if (!real_free) find_real();
    sub(p);
    real_free(p);
}

long long livebytes_now(void) { return atomic_load(&live); }
long long livebytes_peak(void) { return atomic_load(&peak); }
void livebytes_reset_peak(void) { atomic_store(&peak, atomic_load(&live)); }
