// Threads. A job is a body that claims numbered tasks from a shared counter until none is left, so it is right for any
// number of threads, including the caller alone. Helper threads join a job if they are running anyway; the caller waits
// for tasks that a helper has begun, never for a helper to arrive. On a machine whose cores are shared (a server beside
// the engine) that is the difference between losing one core for a while and stopping at every op, as a barrier that all
// threads must reach does.
#ifndef TGI_TEAM_H
#define TGI_TEAM_H

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

typedef struct {
  _Alignas(64) atomic_long next;
  _Alignas(64) atomic_long done;
} tasks;

INLINE long claim(tasks *t) { return atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed); }
INLINE void finish(tasks *t) { atomic_fetch_add_explicit(&t->done, 1, memory_order_release); }

// One turn of waiting for another thread: it may be on this very core.
INLINE void idle(long turn) {
  if (turn < 1000)
    _mm_pause();
  else
    sched_yield();
}

// Wait until `count` tasks have been finished by whoever claimed them.
static void wait_for(tasks *t, long count) {
  for (long turn = 0; atomic_load_explicit(&t->done, memory_order_acquire) < count; turn++) idle(turn);
}

static __thread int team_member;  // of a job: 0 the caller, then its helpers

// Tasks over memory that is read in order. Each thread begins with a run of them that is its own, so that what it asks for
// ahead is what it reads next, and not what another one does; whose run is done goes on with those of others.
enum { MOST_RUNS = 8 };
typedef struct {
  struct {
    _Alignas(64) atomic_long taken;
  } runs[MOST_RUNS];
  long count, num_runs;
} ordered_tasks;

INLINE void set_ordered(ordered_tasks *t, long count, long threads) {
  t->count = count;
  t->num_runs = threads < MOST_RUNS ? threads : MOST_RUNS;
}

// The next task, or -1.
INLINE long claim_in_order(ordered_tasks *t) {
  for (long i = 0; i < t->num_runs; i++) {
    const long run = (team_member + i) % t->num_runs;
    const long start = t->count * run / t->num_runs, end = t->count * (run + 1) / t->num_runs;
    if (start + atomic_load_explicit(&t->runs[run].taken, memory_order_relaxed) >= end) continue;
    const long task = start + atomic_fetch_add_explicit(&t->runs[run].taken, 1, memory_order_relaxed);
    if (task < end) return task;
  }
  return -1;
}

typedef void (*team_body)(void *);

enum { OPEN = 1 << 20 };          // in `team.state`
enum { MAX_HELPERS = 255 };
enum { SPINS_BEFORE_SLEEP = 2000 };  // about a tenth of a millisecond: longer than the gap between two ops of a step

static struct {
  _Alignas(64) atomic_int state;  // OPEN while the job may be joined, plus the number of helpers inside
  _Alignas(64) atomic_int jobs;   // how many there have been; helpers wait for it to change
  _Alignas(64) atomic_int sleepers;
  team_body body;
  void *context;
  atomic_int wanted;   // helpers that may join
  int helpers;         // that exist
  atomic_flag in_use;
} team = {.in_use = ATOMIC_FLAG_INIT};

// Numbers below 2^-126 count as zero inside the kernels: softmax weights of far keys would otherwise cost a hundred
// times an ordinary product each. Returns what to give back to `_mm_setcsr`.
INLINE unsigned flush_denormals(void) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | 0x40);  // 0x40: denormal inputs are zeros
  return before;
}

static void *help(void *number) {
  const int me = (int)(intptr_t)number;
  team_member = me + 1;
  flush_denormals();
  int seen = 0;
  for (;;) {
    int jobs, spins = 0;
    while ((jobs = atomic_load_explicit(&team.jobs, memory_order_acquire)) == seen) {
      if (spins++ < SPINS_BEFORE_SLEEP) {
        _mm_pause();
        continue;
      }
      atomic_fetch_add(&team.sleepers, 1);
      syscall(SYS_futex, &team.jobs, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
      atomic_fetch_sub(&team.sleepers, 1);
    }
    seen = jobs;
    if (me >= atomic_load_explicit(&team.wanted, memory_order_relaxed)) continue;
    // Inside, the job cannot end: the caller closes it and then waits for the count to fall to zero.
    if (atomic_fetch_add(&team.state, 1) & OPEN) team.body(team.context);
    atomic_fetch_sub(&team.state, 1);
  }
  return 0;
}

// A child of fork has none of the helpers.
static void forget_helpers(void) {
  team.helpers = 0;
  atomic_store(&team.state, 0);
  atomic_store(&team.sleepers, 0);
  atomic_flag_clear(&team.in_use);
}

static void start_helpers(int count) {
  static atomic_flag registered = ATOMIC_FLAG_INIT;
  if (!atomic_flag_test_and_set(&registered)) pthread_atfork(0, 0, forget_helpers);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program
  for (; team.helpers < count && team.helpers < MAX_HELPERS; team.helpers++) {
    pthread_t thread;
    if (pthread_create(&thread, 0, help, (void *)(intptr_t)team.helpers)) break;
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, 0);
}

// Run the body on this thread and on up to `threads - 1` helpers, no more than there are tasks for.
static void run_team(team_body body, void *context, long count, int threads) {
  if (threads > count) threads = (int)count;
  const unsigned control = flush_denormals();
  // A second thread that calls an op meanwhile works alone.
  if (threads <= 1 || atomic_flag_test_and_set_explicit(&team.in_use, memory_order_acquire)) {
    body(context);
    _mm_setcsr(control);
    return;
  }
  if (team.helpers < threads - 1) start_helpers(threads - 1);
  team.body = body;
  team.context = context;
  atomic_store_explicit(&team.wanted, threads - 1, memory_order_relaxed);
  atomic_fetch_or(&team.state, OPEN);
  atomic_fetch_add(&team.jobs, 1);
  if (atomic_load(&team.sleepers)) syscall(SYS_futex, &team.jobs, FUTEX_WAKE_PRIVATE, MAX_HELPERS, 0, 0, 0);
  body(context);
  atomic_fetch_and(&team.state, ~OPEN);
  for (long turn = 0; atomic_load_explicit(&team.state, memory_order_acquire) != 0; turn++) idle(turn);
  atomic_flag_clear_explicit(&team.in_use, memory_order_release);
  _mm_setcsr(control);
}

// A buffer of the calling thread that only grows. Contents do not survive a larger request.
typedef struct {
  void *memory;
  size_t size;
} scratch;

static void *reserve(scratch *s, size_t size) {
  if (s->size < size) {
    size = (size + 4095) & ~(size_t)4095;
    free(s->memory);
    s->memory = aligned_alloc(4096, size);
    s->size = s->memory ? size : 0;
    if (!s->memory) abort();
  }
  return s->memory;
}

#endif
