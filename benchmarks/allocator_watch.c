/* Counts what torch's CPU allocator holds, from the process's first byte: to be preloaded.

   Only calls from libc10, where torch's allocator lies, are counted: bytes as they were asked for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PLACES (1u << 20)

static struct { void *at; size_t size; } table[PLACES]; /* open addressing: what follows a released one moves up */
static atomic_flag lock = ATOMIC_FLAG_INIT;
static long long live, peak, trap;
static uintptr_t from, to;
static void (*trapped)(long long, long long);
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static int find_c10(struct dl_phdr_info *info, size_t size, void *unused) {
    if (!strstr(info->dlpi_name, "libc10.so")) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_X)) {
            from = info->dlpi_addr + part->p_vaddr;
            to = from + part->p_memsz;
        }
    }
    return 1;
}

static unsigned place_of(void *at) { return (unsigned)(((uintptr_t)at >> 6) * 2654435761u) % PLACES; }

static void release(unsigned hole) {
    for (unsigned i = (hole + 1) % PLACES; table[i].at; i = (i + 1) % PLACES) {
        unsigned home = place_of(table[i].at);
        if (((i - home) % PLACES) >= ((i - hole) % PLACES)) {
            table[hole] = table[i];
            hole = i;
        }
    }
    table[hole].at = NULL;
}

int posix_memalign(void **at, size_t alignment, size_t size) {
    if (!real_memalign) *(void **)&real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    int failed = real_memalign(at, alignment, size);
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    if (failed || !size) return failed;
    if (!from) dl_iterate_phdr(find_c10, NULL);
    if (caller < from || caller >= to) return failed;
    while (atomic_flag_test_and_set(&lock)) {}
    unsigned i = place_of(*at);
    while (table[i].at) i = (i + 1) % PLACES;
    table[i].at = *at;
    table[i].size = size;
    live += size;
    if (live > peak) peak = live;
    long long now = live, above = trap;
    if (above && now > above) trap = 0;
    atomic_flag_clear(&lock);
    if (above && now > above && trapped) trapped(now, (long long)size);
    return failed;
}

void free(void *at) {
    if (!real_free) *(void **)&real_free = dlsym(RTLD_NEXT, "free");
    if (from && at && !((uintptr_t)at & 63)) {
        while (atomic_flag_test_and_set(&lock)) {}
        for (unsigned i = place_of(at); table[i].at; i = (i + 1) % PLACES)
            if (table[i].at == at) {
                live -= table[i].size;
                release(i);
                break;
            }
        atomic_flag_clear(&lock);
    }
    real_free(at);
}

long long watch_live(void) { return live; }
long long watch_peak(void) { return peak; }
void watch_begin(void) { peak = live; }
/* Calls back once when more than so many bytes live: to find what made them. */
void watch_trap(long long above, void (*call)(long long, long long)) { trapped = call; trap = above; }
