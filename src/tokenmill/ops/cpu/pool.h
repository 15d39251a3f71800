// One pool of threads that run a step together. A phase's tasks are taken from a counter, and the next phase begins
// when all are finished: a thread that comes late, or loses its core between tasks, holds no one up.
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define MAX_PHASES 16384  // of one step
#define SPINS 4096

typedef struct pool pool;
typedef struct {
    pool *pool;
    int phase, held;  // held: tasks that this thread has taken and not finished
    uint8_t *scratch;        // the thread's own, `scratch_bytes`
    size_t scratch_bytes;
} worker;
typedef void (*step_function)(worker *, void *);

struct pool {
    int size;
    worker *workers;
    pthread_t *threads;
    pthread_mutex_t mutex;
    pthread_cond_t wakes;
    step_function function;
    void *argument;
    _Atomic uint64_t generation;
    _Atomic int is_open, inside, is_closing;  // helpers may join the step; those that have
    struct {
        _Atomic int taken, finished;
    } phases[MAX_PHASES];
};

static inline void relax(int *spins) {
    if (++*spins < SPINS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    } else {
        *spins = 0;
        sched_yield();
    }
}

// The first of `count` tasks of this phase that are not taken, of which `chunk` are now this thread's; -1: none.
// Those that it had are finished.
static inline int take(worker *self, int count, int chunk) {
    __auto_type phase = &self->pool->phases[self->phase];
    if (self->held) atomic_fetch_add(&phase->finished, self->held);
    int first = atomic_load(&phase->taken) < count ? atomic_fetch_add(&phase->taken, chunk) : count;
    self->held = first >= count ? 0 : count - first < chunk ? count - first : chunk;
    return self->held ? first : -1;
}

// Waits until all tasks of the phase are finished; the next begins. A late thread finds that so, and what it computed
// before is of no use to anyone.
static void meet(worker *self, int count) {
    int spins = 0;
    while (atomic_load(&self->pool->phases[self->phase].finished) < count) relax(&spins);
    self->phase++;
}

static uint8_t *scratch_of(worker *self, size_t bytes) {
    if (bytes > self->scratch_bytes) {
        free(self->scratch);
        self->scratch_bytes = (bytes + 4095) / 4096 * 4096;
        self->scratch = aligned_alloc(64, self->scratch_bytes);
        if (self->scratch == NULL) abort();
    }
    return self->scratch;
}

static void *serve(void *argument) {
    worker *self = argument;
    pool *all = self->pool;
    uint64_t seen = 0;
    for (;;) {
        for (int spins = 0; atomic_load(&all->generation) == seen && spins < SPINS; spins++) {
            int pause = 0;
            relax(&pause);
        }
        pthread_mutex_lock(&all->mutex);
        while (atomic_load(&all->generation) == seen) pthread_cond_wait(&all->wakes, &all->mutex);
        pthread_mutex_unlock(&all->mutex);
        seen = atomic_load(&all->generation);
        if (atomic_load(&all->is_closing)) return NULL;
        atomic_fetch_add(&all->inside, 1);  // before it looks: from then on the step's memory stays
        if (atomic_load(&all->is_open)) {
            self->phase = self->held = 0;
            all->function(self, all->argument);
        }
        atomic_fetch_sub(&all->inside, 1);
    }
}

static void wake(pool *all) {
    pthread_mutex_lock(&all->mutex);
    atomic_fetch_add(&all->generation, 1);
    pthread_cond_broadcast(&all->wakes);
    pthread_mutex_unlock(&all->mutex);
}

// This thread runs the function, and so do the others if they come in time. One call at a time: the caller sees to it.
static void run_all(pool *all, step_function function, void *argument, int phases) {
    for (int i = 0; i < phases; i++) {
        atomic_store_explicit(&all->phases[i].taken, 0, memory_order_relaxed);
        atomic_store_explicit(&all->phases[i].finished, 0, memory_order_relaxed);
    }
    all->function = function, all->argument = argument;
    atomic_store(&all->is_open, 1);
    if (all->size > 1) wake(all);
    all->workers[0].phase = all->workers[0].held = 0;
    function(&all->workers[0], argument);
    atomic_store(&all->is_open, 0);
    int spins = 0;
    while (atomic_load(&all->inside)) relax(&spins);
}

void pool_close(pool *all) {
    atomic_store(&all->is_closing, 1);
    wake(all);
    for (int i = 1; i < all->size; i++) {
        if (all->threads[i]) pthread_join(all->threads[i], NULL);
    }
    for (int i = 0; i < all->size; i++) free(all->workers[i].scratch);
    free(all->workers), free(all->threads), free(all);
}

pool *pool_open(int size) {
    pool *all = calloc(1, sizeof *all);
    all->workers = calloc(size, sizeof *all->workers);
    all->threads = calloc(size, sizeof *all->threads);
    pthread_mutex_init(&all->mutex, NULL), pthread_cond_init(&all->wakes, NULL);
    all->size = size;
    for (int i = 0; i < size; i++) all->workers[i] = (worker){.pool = all};
    sigset_t before, every;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);  // signals are for the threads that wait for them
    for (int i = 1; i < size; i++) {
        if (pthread_create(&all->threads[i], NULL, serve, &all->workers[i])) {
            all->size = i;
            pool_close(all);
            all = NULL;
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return all;
}
