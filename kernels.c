// kernels.c: what CPU ranks spend their time on, in C. kernels.py compiles it once and calls it.
//
//   1. collectives between the processes of one Linux host, through shared memory and a futex
//   2. threads: the cores of one rank, for 3 and 4
//   3. matrix products with few rows, at the speed of reading the weights
//   4. the paged KV cache: write and attention, pages read in place
//
// It knows no models and no requests. Every function has a twin that defines it, in torch
// (kernels.py) or in gloo (shift.py), and tests hold the two together. Sizes are in elements unless
// they say bytes. Atomics are C11's, sequentially consistent: right on Arm too (not tested there).
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { W = __BIGGEST_ALIGNMENT__ / 4 };          // floats in a vector register: 16 with AVX-512
typedef float vec __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));

#ifdef __x86_64__
#define pause_cpu __builtin_ia32_pause
#else
#define pause_cpu() ((void)0)
#endif

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// Sleep until woken, unless the word has changed already. Returns 1 after a quarter of a second.
static int futex_sleep(_Atomic uint32_t *word, uint32_t seen) {
  struct timespec limit = {0, 250000000};
  return syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, 0, 0) && errno == ETIMEDOUT;
}
static void wake_all(_Atomic uint32_t *w) { syscall(SYS_futex, w, FUTEX_WAKE, INT32_MAX, 0, 0, 0); }

// ------------------------------------------------------------------------------------------------
// 1. Collectives
//
// A group's memory: the gate, then two sets of `size` slots, one slot a rank. A collective is
// "write your slot, meet, read the others' slots"; large tensors go in pieces. Successive pieces
// use the two sets in turn, and that makes one meeting a piece enough: who writes set 0 again has
// met everybody in between, so everybody has finished reading it.

enum { MAX_RANKS = 256, HEAD = 64 };             // HEAD bytes in front of a slot's data

typedef struct {
  _Alignas(64) _Atomic uint32_t arrived, generation, sleepers;   // a cache line each
  _Alignas(64) _Atomic int32_t pid[MAX_RANKS];
} Gate;

typedef struct {
  Gate *gate;
  char *slots;
  int rank, size, spins;
  int64_t room;                                  // bytes of data in a slot
  double patience;                               // seconds to wait for a rank that lives
  uint64_t piece;                                // so many there were: tells which set is next
} Group;

int64_t group_bytes(int size, int64_t room) { return sizeof(Gate) + 2 * size * (HEAD + room); }

Group *group_open(char *memory, int rank, int size, int64_t room, int spins, double patience) {
  Group *g = malloc(sizeof *g);
  *g = (Group){(Gate *)memory, memory + sizeof(Gate), rank, size, spins, room, patience, 0};
  atomic_store(&g->gate->pid[rank], getpid());
  return g;
}

// Returns 0 when all ranks have come, r + 1 if rank r has died, -1 if patience has run out.
static int meet(Group *g) {
  Gate *gate = g->gate;
  const uint32_t now = atomic_load(&gate->generation);
  if (atomic_fetch_add(&gate->arrived, 1) + 1 == (uint32_t)g->size) {    // the last opens the gate
    atomic_store(&gate->arrived, 0);
    atomic_fetch_add(&gate->generation, 1);
    if (atomic_load(&gate->sleepers)) wake_all(&gate->generation);
    return 0;
  }
  for (int i = 0; i < g->spins; i++, pause_cpu())
    if (atomic_load(&gate->generation) != now) return 0;
  int lost = 0;
  atomic_fetch_add(&gate->sleepers, 1);
  for (double waited = 0; atomic_load(&gate->generation) == now && !lost; ) {
    if (!futex_sleep(&gate->generation, now)) continue;
    if ((waited += 0.25) > g->patience) lost = -1;
    for (int r = 0; r < g->size; r++)
      if (kill(atomic_load(&gate->pid[r]), 0) && errno == ESRCH) lost = r + 1;
  }
  atomic_fetch_sub(&gate->sleepers, 1);
  return atomic_load(&gate->generation) == now ? lost : 0;       // it may have come and then died
}
#define MEET(g) do { int lost = meet(g); if (lost) return lost; } while (0)

static char *slot(Group *g, int rank) {          // of this piece
  return g->slots + ((g->piece & 1) * g->size + rank) * (HEAD + g->room) + HEAD;
}

typedef union { uint32_t i; float f; } Bits;
static float from_bf16(uint16_t b) { return (Bits){.i = (uint32_t)b << 16}.f; }
static uint16_t to_bf16(float f) {               // to nearest, ties to even
  uint32_t i = (Bits){.f = f}.i;
  return f == f ? (i + 0x7fff + ((i >> 16) & 1)) >> 16 : 0x7fc0;
}

// out[lo:hi] = that part of all slots, added in rank order: the same on every rank, every run.
static void sum_slots(Group *g, int64_t lo, int64_t hi, char *out, int bf16) {
  float sum[1024];
  for (int64_t at = lo; at < hi; at += 1024) {
    const int64_t n = min64(1024, hi - at);
    memset(sum, 0, sizeof sum);
    for (int r = 0; r < g->size; r++) {
      const float *in = (float *)slot(g, r) + at;
      const uint16_t *in16 = (uint16_t *)slot(g, r) + at;
      if (bf16) for (int64_t i = 0; i < n; i++) sum[i] += from_bf16(in16[i]);
      else for (int64_t i = 0; i < n; i++) sum[i] += in[i];
    }
    if (bf16) for (int64_t i = 0; i < n; i++) ((uint16_t *)out)[at + i] = to_bf16(sum[i]);
    else memcpy((float *)out + at, sum, 4 * n);
  }
}

int all_reduce(Group *g, char *x, int64_t n, int bf16) {
  const int64_t width = bf16 ? 2 : 4, most = g->room / width;
  for (int64_t at = 0; at < n; at += most, g->piece++) {
    const int64_t m = min64(most, n - at);
    char *part = x + at * width;
    memcpy(slot(g, g->rank), part, m * width);
    MEET(g);
    if (m * g->size <= 65536) {                  // small: everybody adds everything
      sum_slots(g, 0, m, part, bf16);
    } else {                                     // large: everybody adds a share, into slot 0
      sum_slots(g, m * g->rank / g->size, m * (g->rank + 1) / g->size, slot(g, 0), bf16);
      MEET(g);
      memcpy(part, slot(g, 0), m * width);
    }
  }
  return 0;
}

// Blocks of x to their ranks: send[r] bytes to rank r, in order; receive[r] bytes from rank r.
// How many pieces it takes, the largest block of all tells: every slot's head has its sender's.
int all_to_all(Group *g, const char *x, const int64_t *send, char *out, const int64_t *receive) {
  const int64_t share = g->room / g->size;
  int64_t most = 0, begin = 0, end = 0;
  for (int r = 0; r < g->size; r++) most = send[r] > most ? send[r] : most;
  for (int r = 0; r < g->rank; r++) begin += send[r], end += receive[r];
  memcpy(out + end, x + begin, send[g->rank]);
  for (int64_t at = 0; at == 0 || at < most; at += share, g->piece++) {
    ((int64_t *)(slot(g, g->rank) - HEAD))[0] = most;
    for (int64_t r = 0, from = 0; r < g->size; from += send[r++])
      if (r != g->rank && at < send[r])
        memcpy(slot(g, g->rank) + r * share, x + from + at, min64(share, send[r] - at));
    MEET(g);
    for (int64_t r = 0, to = 0; r < g->size; to += receive[r++]) {
      const int64_t largest = ((int64_t *)(slot(g, r) - HEAD))[0];
      most = largest > most ? largest : most;
      if (r != g->rank && at < receive[r])
        memcpy(out + to + at, slot(g, r) + g->rank * share, min64(share, receive[r] - at));
    }
  }
  return 0;
}

// bytes[r] bytes of every rank r to all, in rank order; all ranks know all sizes. If all but one
// are 0, this is a broadcast.
int all_gather(Group *g, const char *x, char *out, const int64_t *bytes) {
  int64_t most = 0;
  for (int r = 0; r < g->size; r++) most = bytes[r] > most ? bytes[r] : most;
  for (int64_t at = 0; at < most; at += g->room, g->piece++) {
    if (at < bytes[g->rank])
      memcpy(slot(g, g->rank), x + at, min64(g->room, bytes[g->rank] - at));
    MEET(g);
    for (int64_t r = 0, to = 0; r < g->size; to += bytes[r++])
      if (at < bytes[r]) memcpy(out + to + at, slot(g, r), min64(g->room, bytes[r] - at));
  }
  return 0;
}

// ------------------------------------------------------------------------------------------------
// 2. Threads: `parallel(job, arguments)` calls job(arguments, part, parts) for all parts
//
// Whoever is free takes the next part, so a core that is busy elsewhere delays only its own.

typedef void Job(const void *arguments, int part, int parts);
static struct {
  int threads, parts;
  Job *job;
  const void *arguments;
  _Alignas(64) _Atomic uint32_t next, done, generation, sleepers;  // parts taken, parts finished
} pool = {.threads = 1, .parts = 1};

static int take_part(void) {
  int part = atomic_fetch_add(&pool.next, 1);
  if (part >= pool.parts) return 0;
  pool.job(pool.arguments, part, pool.parts);    // which stays until all parts are done
  atomic_fetch_add(&pool.done, 1);
  return 1;
}

static __attribute__((noreturn)) void *work(void *unused) {
  for (uint32_t seen = atomic_load(&pool.generation); ; seen = atomic_load(&pool.generation)) {
    while (take_part()) {}
    for (int i = 0; i < 4000 && atomic_load(&pool.generation) == seen; i++) pause_cpu();
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(&pool.generation) == seen) futex_sleep(&pool.generation, seen);
    atomic_fetch_sub(&pool.sleepers, 1);
  }
}

int set_threads(int threads) {                   // in the process that computes, so after any fork
  pool.next = pool.parts = threads > 1 ? 2 * threads : 1;
  for (pthread_t thread; pool.threads < threads; pool.threads++)
    if (pthread_create(&thread, 0, work, 0) == 0) pthread_detach(thread);
  return pool.parts;
}

static void parallel(Job *job, const void *arguments) {
  pool.job = job, pool.arguments = arguments;
  atomic_store(&pool.done, 0);
  atomic_store(&pool.next, 0);
  atomic_fetch_add(&pool.generation, 1);
  if (atomic_load(&pool.sleepers)) wake_all(&pool.generation);
  while (take_part()) {}
  for (int i = 0; atomic_load(&pool.done) < (uint32_t)pool.parts; i++)
    if (i < 4000) pause_cpu(); else sched_yield();
}

// ------------------------------------------------------------------------------------------------
// 3. Products with few rows, y (m, n) = x (m, k) @ w: w is read once, as fast as memory gives it

typedef struct { const float *x, *w; float *y; int64_t m, n, k; } Product;

static inline float sum_of(vec a) {              // by halves
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) a[i] += a[i + half];
  return a[0];
}

// Rows j ... j+J-1 of w (n, k), read once for M rows of x: dot products.
static inline __attribute__((always_inline)) void dots(const int M, const int J, const Product *p,
                                                       int64_t i, int64_t j) {
  const int64_t n = p->n, k = p->k;
  const float *x = p->x + i * k, *w = p->w + j * k;
  vec a[8][4] = {0};
  int64_t q = 0;
  for (; q + W <= k; q += W)
    for (int r = 0; r < M; r++) {
      vec v = *(vec *)(x + r * k + q);
      for (int b = 0; b < J; b++) a[r][b] += v * *(vec *)(w + b * k + q);
    }
  for (int r = 0; r < M; r++)
    for (int b = 0; b < J; b++) {
      float s = sum_of(a[r][b]);
      for (int64_t rest = q; rest < k; rest++) s += x[r * k + rest] * w[b * k + rest];
      p->y[(i + r) * n + j + b] = s;
    }
}

static void rows_job(const void *arguments, int part, int parts) {
  const Product *p = arguments;
  const int64_t lo = p->n * part / parts, hi = p->n * (part + 1) / parts;
  for (int64_t at = lo; at < hi; at += 32)       // rows of w that stay near for all of x
    for (int64_t i = 0; i < p->m; i += 8) {
      int64_t j = at, end = min64(at + 32, hi);
#define CASE(M, J) case M:                              \
    for (; j + J <= end; j += J) dots(M, J, p, i, j);   \
    for (; j < end; j++) dots(M, 1, p, i, j);           \
    break;
      switch (min64(8, p->m - i)) {
        CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(5, 2) CASE(6, 2) CASE(7, 2) CASE(8, 2)
      }
    }
}

// The other orientation, w (k, n): four rows of w at a time, each with its weight, are added to y.
// Every part adds its own rows into its own (m, n), so that it reads w in one sweep.
static void columns_job(const void *arguments, int part, int parts) {
  const Product *p = arguments;
  const int64_t n = p->n, k = p->k, hi = k * (part + 1) / parts;
  float *y = p->y + part * p->m * n;
  memset(y, 0, 4 * p->m * n);
  for (int64_t q = k * part / parts; q < hi; q += 4) {
    const float *w[4];
    for (int r = 0; r < 4; r++) w[r] = p->w + min64(q + r, hi - 1) * n;
    for (int64_t i = 0; i < p->m; i++) {
      float *yi = y + i * n, x[4];
      for (int r = 0; r < 4; r++) x[r] = q + r < hi ? p->x[i * k + q + r] : 0;
      for (int64_t j = 0; j < n; j++)
        yi[j] += x[0] * w[0][j] + x[1] * w[1][j] + x[2] * w[2][j] + x[3] * w[3][j];
    }
  }
}

// w is (n, k) if `rows`, else (k, n); then y has room for m * n floats for each part of the sum.
void matmul(const float *x, const float *w, float *y, int64_t m, int64_t n, int64_t k, int rows) {
  parallel(rows ? rows_job : columns_job, &(Product){x, w, y, m, n, k});
  for (int part = 1; part < pool.parts && !rows; part++)
    for (int64_t i = 0; i < m * n; i++) y[i] += y[part * m * n + i];
}

// ------------------------------------------------------------------------------------------------
// 4. The paged KV cache: (2, N, k, B, Dh) floats, [0] keys, [1] values

void write_kv(float *kv, const float *key, const float *value, const int64_t *slots,
              int64_t tokens, int64_t key_stride, int64_t value_stride, int64_t blocks,
              int64_t heads, int64_t size, int64_t dim) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads && slots[t] >= 0; h++) {                 // < 0: padding
      float *to = kv + ((slots[t] / size * heads + h) * size + slots[t] % size) * dim;
      memcpy(to, key + t * key_stride + h * dim, 4 * dim);
      memcpy(to + blocks * heads * size * dim, value + t * value_stride + h * dim, 4 * dim);
    }
}

enum { KEYS = 64, ROWS = 64, MAX_DIM = 256 };    // of a tile: keys, rows (query x head), head size

typedef struct {                                 // kernels.py has the same
  const float *q, *kv;
  float *out;
  const int32_t *tables, *starts, *contexts;
  int64_t requests, pages, heads, kv_heads, blocks, size, dim;
  float scale;
} Attention;

static inline vec exp_of(vec x) {                // for x <= 0, to about 1e-7
  for (int i = 0; i < W; i++) x[i] = x[i] < -87 ? -87 : x[i];
  ivec n = __builtin_convertvector(x * 1.44269504f - 0.5f, ivec);          // to nearest
  vec f = __builtin_convertvector(n, vec), r = x - f * 0.693359375f + f * 2.12194440e-4f;
  vec y = ((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r;
  y = ((y + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
  return (y * r * r + r + 1) * (vec)((n + 127) << 23);                     // times 2^n
}

// scores[row][key] = q[row] . k[key], for all rows and keys of a tile
static void scores_of(float q[][MAX_DIM], int rows, const float **k, int keys, int64_t dim,
                      float scores[][KEYS]) {
  if (rows < 4) {                                // few rows: along the head, as the pages lie
    for (int j = 0; j < keys; j++)
      for (int i = 0; i < rows; i++) {
        vec s = {0};
        for (int64_t d = 0; d < dim; d += W) s += *(vec *)(q[i] + d) * *(vec *)(k[j] + d);
        scores[i][j] = sum_of(s);
      }
    return;
  }
  float turned[MAX_DIM][KEYS];                   // many: along the keys, turned once for all rows
  for (int64_t d = 0; d < dim; d++)
    for (int j = 0; j < KEYS; j++) turned[d][j] = j < keys ? k[j][d] : 0;
  for (int i = 0; i < rows; i += 4)
    for (int j = 0; j < KEYS; j += W) {
      vec s[4] = {0};
      for (int64_t d = 0; d < dim; d++)
        for (int r = 0; r < 4; r++) s[r] += q[i + r][d] * *(vec *)(turned[d] + j);
      for (int r = 0; r < 4; r++) *(vec *)(scores[i + r] + j) = s[r];
    }
}

// A tile: queries first ... last-1 of one request, all heads of one KV head. Softmax as the keys
// come by ("online"): what was added up under an older maximum is scaled down to the new one.
static void attend(const Attention *a, int64_t request, int64_t head, int64_t first, int64_t last) {
  const int64_t dim = a->dim, group = a->heads / a->kv_heads, begin = a->starts[request];
  const int64_t start = a->contexts[request] - (a->starts[request + 1] - begin);
  const int64_t end = start + last;              // position of query i: start + i
  const int rows = (last - first) * group, padded = rows + (rows < 4 ? rows % 2 : -rows & 3);
  float q[ROWS][MAX_DIM], sum[ROWS][MAX_DIM], scores[ROWS][KEYS], top[ROWS], weight[ROWS];
  const float *k[KEYS], *v[KEYS];
#define ROW(i) (((begin + first + (i) / group) * a->heads + head * group + (i) % group) * dim)
  for (int i = 0; i < padded; i++) {
    for (int64_t d = 0; d < dim; d++) q[i][d] = i < rows ? a->q[ROW(i) + d] * a->scale : 0;
    memset(sum[i], 0, 4 * dim);
    top[i] = -1e30f, weight[i] = 0;
  }
  for (int64_t at = 0; at < end; at += KEYS) {
    const int keys = min64(KEYS, end - at);
    for (int j = 0; j < keys; j++) {
      int64_t block = a->tables[request * a->pages + (at + j) / a->size];
      k[j] = a->kv + ((block * a->kv_heads + head) * a->size + (at + j) % a->size) * dim;
      v[j] = k[j] + a->blocks * a->kv_heads * a->size * dim;
    }
    scores_of(q, rows < 4 ? rows : padded, k, keys, dim, scores);
    for (int i = 0; i < padded; i++) {
      float *s = scores[i], high = top[i];
      int64_t sees = i < rows ? min64(start + first + i / group + 1 - at, keys) : 0;
      sees = sees < 0 ? 0 : sees;                // keys up to its own position
      for (int j = 0; j < sees; j++) high = s[j] > high ? s[j] : high;
      for (int j = sees; j < KEYS; j++) s[j] = -1e30f;
      vec total = {0};
      for (int j = 0; j < KEYS; j += W) {
        *(vec *)(s + j) = exp_of(*(vec *)(s + j) - high);
        for (int64_t r = sees > j ? sees : j; r < j + W; r++) s[r] = 0;
        total += *(vec *)(s + j);
      }
      const float fade = exp_of((vec){0} + (top[i] - high))[0];
      for (int64_t d = 0; d < dim; d += W) *(vec *)(sum[i] + d) *= fade;
      weight[i] = weight[i] * fade + sum_of(total), top[i] = high;
    }
    for (int i = 0; i < padded; i += 2)
      for (int64_t d = 0; d < dim; d += W) {
        vec s0 = *(vec *)(sum[i] + d), s1 = *(vec *)(sum[i + 1] + d);
        for (int j = 0; j < keys; j++) {
          s0 += scores[i][j] * *(vec *)(v[j] + d);
          s1 += scores[i + 1][j] * *(vec *)(v[j] + d);
        }
        *(vec *)(sum[i] + d) = s0, *(vec *)(sum[i + 1] + d) = s1;
      }
  }
  for (int i = 0; i < rows; i++)
    for (int64_t d = 0; d < dim; d++) a->out[ROW(i) + d] = sum[i][d] / weight[i];
}

static void attention_job(const void *arguments, int part, int parts) {
  const Attention *a = arguments;
  const int64_t queries = ROWS / (a->heads / a->kv_heads);
  for (int64_t r = 0, task = 0; r < a->requests; r++)
    for (int64_t first = 0, n = a->starts[r + 1] - a->starts[r]; first < n; first += queries)
      for (int64_t head = 0; head < a->kv_heads; head++)
        if (task++ % parts == part) attend(a, r, head, first, min64(first + queries, n));
}

void paged_attention(const Attention *a) { parallel(attention_job, a); }
