// kernels.c: what CPU ranks spend their time on, in C. kernels.py compiles it once and calls it.
//
//   1. collectives between the processes of one Linux host, through shared memory and a futex
//   2. threads: the cores of one rank, for 3 and 4
//   3. matrix products, at the speed of memory or of the arithmetic units; norms and SiLU
//   4. the paged KV cache: rotation, write and attention, pages read in place
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

// out[lo:hi] = that part of all slots, added in rank order: the same on every rank, every run.
static void sum_slots(Group *g, int64_t lo, int64_t hi, float *out) {
  for (int r = 0; r < g->size; r++)
    for (int64_t i = lo; i < hi; i++) out[i] = (r ? out[i] : 0) + ((float *)slot(g, r))[i];
}

int all_reduce(Group *g, float *x, int64_t n) {
  const int64_t most = g->room / 4;
  for (int64_t at = 0; at < n; at += most, x += most, g->piece++) {
    const int64_t m = min64(most, n - at);
    memcpy(slot(g, g->rank), x, 4 * m);
    MEET(g);
    if (m * g->size <= 65536) {                  // small: everybody adds everything
      sum_slots(g, 0, m, x);
    } else {                                     // large: everybody adds a share, into slot 0
      sum_slots(g, m * g->rank / g->size, m * (g->rank + 1) / g->size, (float *)slot(g, 0));
      MEET(g);
      memcpy(x, slot(g, 0), 4 * m);
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

void set_threads(int threads) {                   // in the process that computes, so after any fork
  pool.next = pool.parts = threads > 1 ? 2 * threads : 1;
  for (pthread_t thread; pool.threads < threads; pool.threads++)
    if (pthread_create(&thread, 0, work, 0) == 0) pthread_detach(thread);
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
// 3. Products, y (m, n) = x (m, k) @ w (k, n), and what stands between them
//
// All rests on one tile: TALL rows x WIDE vectors of y stay in registers while k goes by. Few rows
// read w once, as fast as memory gives it; many rows keep the arithmetic units busy.

enum { TALL = 6, WIDE = W == 8 ? 2 : 4, DEEP = 512 };      // AVX2 has 16 registers, the others 32

static inline __attribute__((always_inline)) void tile(const int M, const int V, const float *x,
    int64_t x_row, const float *w, int64_t w_row, float *y, int64_t y_row, int64_t k, int add) {
  vec sum[TALL][WIDE];
  for (int a = 0; a < M; a++)
    for (int b = 0; b < V; b++) sum[a][b] = add ? *(vec *)(y + a * y_row + b * W) : (vec){0};
  for (int64_t q = 0; q < k; q++, w += w_row)
    for (int b = 0; b < V; b++) {
      const vec v = *(vec *)(w + b * W);
      for (int a = 0; a < M; a++) sum[a][b] += x[a * x_row + q] * v;
    }
  for (int a = 0; a < M; a++)
    for (int b = 0; b < V; b++) *(vec *)(y + a * y_row + b * W) = sum[a][b];
}

// y = x @ w, or y += x @ w. Rows are x_row, w_row and y_row floats apart.
static void product(const float *x, int64_t x_row, const float *w, int64_t w_row,
                    float *y, int64_t y_row, int64_t m, int64_t n, int64_t k, int add) {
  float packed[DEEP * WIDE * W];
  const int pack = m >= 64;                      // many rows: copy a piece of w, to read it in line
  const int64_t depth = pack ? DEEP : m <= 2 && n > 4096 ? 16 : k;           // far rows: sweep
  for (int64_t at = 0, deep; at < k; at += deep)
    for (int64_t j = 0, v; j < n; j += v) {
      deep = min64(depth, k - at);
      v = n - j >= WIDE * W ? WIDE * W : n - j >= W ? W : n - j;
      const float *piece = w + at * w_row + j;
      int64_t piece_row = w_row;
      if (pack) {
        for (int64_t q = 0; q < deep; q++) memcpy(packed + q * v, piece + q * w_row, 4 * v);
        piece = packed, piece_row = v;
      }
      for (int64_t i = 0; i < m; i += TALL) {
        const int rows = min64(TALL, m - i), more = add || at;
        const float *xi = x + i * x_row + at;
        float *yi = y + i * y_row + j;
#define CASE(M, V) case M: tile(M, V, xi, x_row, piece, piece_row, yi, y_row, deep, more); break;
#define CASES(V) \
  switch (rows) { CASE(1, V) CASE(2, V) CASE(3, V) CASE(4, V) CASE(5, V) CASE(6, V) }
        if (v == WIDE * W) CASES(WIDE)
        else if (v == W) CASES(1)
        else for (int a = 0; a < rows; a++)      // the last columns, fewer than a vector has
          for (int64_t b = 0; b < v; b++) {
            float s = more ? yi[a * y_row + b] : 0;
            for (int64_t q = 0; q < deep; q++) s += xi[a * x_row + q] * piece[q * piece_row + b];
            yi[a * y_row + b] = s;
          }
      }
    }
}

typedef struct { const float *x, *w; float *y; int64_t blocks, m, n, k; float eps; } Product;

static void product_job(const void *arguments, int part, int parts) {      // some columns of y
  const Product *p = arguments;
  const int64_t n = p->n, vectors = (n + W - 1) / W, all = p->blocks * vectors;
  for (int64_t at = all * part / parts, end = all * (part + 1) / parts, next; at < end; at = next) {
    const int64_t block = at / vectors, first = at % vectors * W;
    next = min64(end, (block + 1) * vectors);
    const int64_t last = min64(n, (next - block * vectors) * W);
    product(p->x, p->k, p->w + block * p->k * n + first, n, p->y + block * p->m * n + first, n,
            p->m, last - first, p->k, 0);
  }
}

// x (m, k), w (b blocks, k, n) -> y (b, m, n)
void matmul(const float *x, const float *w, float *y, int64_t b, int64_t m, int64_t n, int64_t k) {
  parallel(product_job, &(Product){x, w, y, b, m, n, k, 0});
}

// The next n floats, but at most a vector of them; zeros behind.
static inline vec load(const float *x, int64_t n) {
  vec v = {0};
  memcpy(&v, x, 4 * min64(W, n));
  return v;
}

static void rms_norm_job(const void *arguments, int part, int parts) {     // some rows of y
  const Product *p = arguments;
  for (int64_t i = p->m * part / parts; i < p->m * (part + 1) / parts; i++) {
    const float *x = p->x + i * p->n;
    vec squares = {0};
    for (int64_t j = 0; j < p->n; j += W) squares += load(x + j, p->n - j) * load(x + j, p->n - j);
    float sum = 0;
    for (int lane = 0; lane < W; lane++) sum += squares[lane];
    const float scale = 1 / __builtin_sqrtf(sum / p->n + p->eps);
    for (int64_t j = 0; j < p->n; j++) p->y[i * p->n + j] = x[j] * scale * p->w[j];
  }
}

// x (m, n), each row scaled to a mean square of 1, times weight (n,) -> y (m, n)
void rms_norm(const float *x, const float *weight, float *y, int64_t m, int64_t n, float eps) {
  parallel(rms_norm_job, &(Product){x, weight, y, 1, m, n, 0, eps});
}

static inline vec exp_of(vec x) {                // to about 1e-7, for |x| < 87; beyond as there
  for (int i = 0; i < W; i++) x[i] = x[i] < -87 ? -87 : x[i] > 87 ? 87 : x[i];
  ivec n = __builtin_convertvector(x * 1.44269504f + 128.5f, ivec) - 128;  // to nearest
  vec f = __builtin_convertvector(n, vec), r = x - f * 0.693359375f + f * 2.12194440e-4f;
  vec y = ((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r;
  y = ((y + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
  return (y * r * r + r + 1) * (vec)((n + 127) << 23);                     // times 2^n
}

static void silu_mul_job(const void *arguments, int part, int parts) {     // some rows of y
  const Product *p = arguments;
  for (int64_t i = p->m * part / parts; i < p->m * (part + 1) / parts; i++)
    for (int64_t block = 0; block < p->blocks; block++)
      for (int64_t j = 0, left = p->n; j < p->n; j += W, left -= W) {
        const float *gate = p->x + (block * p->m + i) * 2 * p->n + j;
        vec g = load(gate, left), y = g / (1 + exp_of(-g)) * load(gate + p->n, left);
        memcpy(p->y + (i * p->blocks + block) * p->n + j, &y, 4 * min64(W, left));
      }
}

// x (blocks, m, [gate n, up n]) -> silu(gate) * up, y (m, blocks * n)
void silu_mul(const float *x, float *y, int64_t blocks, int64_t m, int64_t n) {
  parallel(silu_mul_job, &(Product){x, 0, y, blocks, m, n, 0, 0});
}

// ------------------------------------------------------------------------------------------------
// 4. The paged KV cache: (2, N, k, B, Dh) floats, [0] keys, each page turned to (Dh, B); [1] values

enum { KEYS = 64, ROWS = 60, MAX_DIM = 256 };    // of a tile: keys, rows (query x head), head size

typedef struct {                                 // kernels.py has the same
  const float *qkv, *cos, *sin;                  // (T, h + 2k, Dh), (T, Dh) twice
  float *q, *kv, *out;                           // (T, h, Dh), the pool, (T, h, Dh)
  const int64_t *slots;
  const int32_t *tables, *starts, *contexts;
  int64_t tokens, requests, pages, heads, kv_heads, blocks, size, dim;
  float scale;
} Attention;

static float *page_of(const Attention *a, int64_t block, int64_t head, int value) {
  return a->kv + ((value * a->blocks + block) * a->kv_heads + head) * a->size * a->dim;
}

// Rotate queries and keys by their positions; keys and values to their slots.
static void rotate_job(const void *arguments, int part, int parts) {
  const Attention *a = arguments;
  const int64_t dim = a->dim, half = dim / 2, size = a->size, all = a->heads + 2 * a->kv_heads;
  for (int64_t t = a->tokens * part / parts; t < a->tokens * (part + 1) / parts; t++)
    for (int64_t head = 0; head < all; head++) {
      const float *x = a->qkv + (t * all + head) * dim, *cos = a->cos + t * dim;
      const float *sin = a->sin + t * dim;
      const int64_t key = head - a->heads, slot = a->slots[t], offset = slot % size;
      const int value = key >= a->kv_heads;
      float y[MAX_DIM], *to = key < 0 ? a->q + (t * a->heads + head) * dim : y;
      for (int64_t d = 0; d < half && !value; d++) {
        to[d] = x[d] * cos[d] + x[d + half] * sin[d];
        to[d + half] = x[d + half] * cos[d + half] + x[d] * sin[d + half];
      }
      if (key < 0 || slot < 0) continue;         // slot < 0: padding
      float *page = page_of(a, slot / size, key % a->kv_heads, value);
      if (value) memcpy(page + offset * dim, x, 4 * dim);
      else for (int64_t d = 0; d < dim; d++) page[d * size + offset] = y[d];
    }
}

// A tile: queries first ... last-1 of one request, all heads of one KV head. Softmax as the keys
// come by ("online"): what was added up under an older maximum is scaled down to the new one.
static void attend(const Attention *a, int64_t request, int64_t head, int64_t first, int64_t last) {
  const int64_t dim = a->dim, size = a->size, group = a->heads / a->kv_heads;
  const int64_t begin = a->starts[request];
  const int32_t *table = a->tables + request * a->pages;
  // query i of the request stands at position start + i
  const int64_t start = a->contexts[request] - a->starts[request + 1] + begin, end = start + last;
  const int rows = (last - first) * group;
  float q[ROWS * MAX_DIM], sum[ROWS * MAX_DIM], scores[ROWS][KEYS], top[ROWS], weight[ROWS];
#define ROW(i) (((begin + first + (i) / group) * a->heads + head * group + (i) % group) * dim)
  for (int i = 0; i < rows; i++) {
    for (int64_t d = 0; d < dim; d++) q[i * dim + d] = a->q[ROW(i) + d] * a->scale;
    top[i] = -1e30f, weight[i] = 0;
  }
  memset(sum, 0, 4 * rows * dim);
  for (int64_t at = 0, stop; at < end; at = stop) {
    stop = at + KEYS;
    for (int64_t j = at, n; j < stop && j < end; j += n) {       // n keys lie together in a page
      n = min64(size - j % size, stop - j);
      const float *values = page_of(a, table[j / size], head, 1) + j % size * dim;
      for (int64_t d = 0; d < n * dim; d += 16) __builtin_prefetch(values + d);
      product(q, dim, page_of(a, table[j / size], head, 0) + j % size, size, scores[0] + (j - at),
              KEYS, rows, n, dim, 0);
    }
    for (int i = 0; i < rows; i++) {
      float *s = scores[i], high = top[i];
      int64_t sees = min64(start + first + i / group + 1 - at, KEYS);
      sees = sees < 0 ? 0 : sees;                // keys up to its own position
      for (int j = sees; j < KEYS; j++) s[j] = -1e30f;
      for (int j = 0; j < KEYS; j++) high = s[j] > high ? s[j] : high;
      vec total = {0};
      for (int j = 0; j < KEYS; j += W) {
        *(vec *)(s + j) = exp_of(*(vec *)(s + j) - high);
        total += *(vec *)(s + j);
      }
      const float fade = exp_of((vec){0} + (top[i] - high))[0];
      for (int64_t d = 0; d < dim; d++) sum[i * dim + d] *= fade;
      weight[i] *= fade, top[i] = high;
      for (int lane = 0; lane < W; lane++) weight[i] += total[lane];
    }
    for (int64_t j = at, n; j < stop && j < end; j += n) {
      n = min64(size - j % size, stop - j);
      product(scores[0] + (j - at), KEYS, page_of(a, table[j / size], head, 1) + j % size * dim,
              dim, sum, dim, rows, dim, min64(n, end - j), 1);
    }
  }
  for (int i = 0; i < rows; i++)
    for (int64_t d = 0; d < dim; d++) a->out[ROW(i) + d] = sum[i * dim + d] / weight[i];
}

static void attention_job(const void *arguments, int part, int parts) {
  const Attention *a = arguments;
  const int64_t queries = ROWS / (a->heads / a->kv_heads);
  for (int64_t r = 0, task = 0; r < a->requests; r++)
    for (int64_t first = 0, n = a->starts[r + 1] - a->starts[r]; first < n; first += queries)
      for (int64_t head = 0; head < a->kv_heads; head++)
        if (task++ % parts == part) attend(a, r, head, first, min64(first + queries, n));
}

// Returns 1; or 0, having done nothing, if a request has more queries than context, or pages for
// less than its context, or if there are fewer tokens than queries.
int attention(const Attention *a) {
  for (int64_t r = 0; r < a->requests; r++) {
    const int64_t n = a->starts[r + 1] - a->starts[r], seen = n ? a->contexts[r] : 0;
    if (n < 0 || n > seen || seen > a->pages * a->size || a->starts[r + 1] > a->tokens) return 0;
  }
  parallel(rotate_job, a);
  parallel(attention_job, a);
  return 1;
}
