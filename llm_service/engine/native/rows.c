/* Decoder layers of the Llama kind over paged keys and values, made for few rows at a time.
 *
 * A row is one token of any sequence, decoding or part of a prompt. Each row is computed in an
 * order of its own that no other row changes, so its result does not depend on its neighbours:
 * not on how many they are, nor on the number of threads.
 *
 * Weights are the decoder's own tensors, [out, in] row-major, float32 or bfloat16, read in place;
 * width, inner width and head size are multiples of 32.
 * Activations and sums are float32. With bfloat16 weights the inputs of a product are rounded to
 * bfloat16, as the decoder's own modules do.
 *
 * One source, compiled once for each kind of processor (see hatch_build.py); the vectors are GCC's and
 * Clang's vector extensions, but for the bfloat16 dot product of AVX512-BF16.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

/* Rows of a weight that a thread takes at a time: about 40 to 100 KB of memory read in a line. */
#define CHUNK 32
#define SPINS 4000
/* Input rows whose gates are held at a time. */
#define SOME_ROWS 16
/* Of a core's nearest cache, what the inputs of a product may fill. */
#define NEAR_BYTES 24576
/* Tokens a block of keys and values holds. Inside it, for one head, lie
 *   float32:  keys [head_dim][BLOCK], values [BLOCK][head_dim];
 *   bfloat16: keys [head_dim / 2][BLOCK][2], values [BLOCK / 2][head_dim][2];
 * so that one vector holds the same elements of many tokens, or of a pair of tokens, and neither
 * scores nor weighted sums need a sum across a vector. */
#define BLOCK 16
#define PARTS (BLOCK / LANES)

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef vf vf_any __attribute__((aligned(2), may_alias));
typedef vu vu_any __attribute__((aligned(2), may_alias));

enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* As in library.py. Absent weights are null. */
typedef struct {
  const float *input_norm, *post_norm, *q_norm, *k_norm;
  const void *q, *k, *v, *o, *gate, *up, *down;
  const float *q_bias, *k_bias, *v_bias;
} Layer;

typedef struct {
  int64_t kind, layers, width, heads, kv_heads, head_dim, inner, vocab;
  float eps, scale;
  const Layer *layer;
  const float *norm;
  const void *head;
} Model;

typedef struct {
  void *pool;           /* [layer, key or value, block, kv head, BLOCK * head_dim] */
  int64_t blocks;
  int64_t rows;
  float *hidden;        /* [rows, width]: embeddings in, destroyed */
  const float *cos, *sin; /* [rows, head_dim] */
  const int64_t *slots; /* [rows]: block times BLOCK plus place */
  const int32_t *tables; /* [rows, table_width]: blocks of the row's sequence */
  int64_t table_width;
  const int32_t *seen;  /* [rows]: tokens it attends to, its own included */
  const int32_t *picked; /* [picked_count]: rows whose logits are wanted */
  int64_t picked_count;
  float *logits;        /* [picked_count, vocab] */
  int32_t *best;        /* [picked_count]: the likeliest token */
  int32_t *finite;      /* [picked_count]: whether all its logits are numbers */
} Step;

/* ---- numbers ---- */

static inline vf splat(float value) { return value - (vf){}; }

static inline vf larger(vf a, vf b) {
  vu take = (vu)(a > b);
  return (vf)((take & (vu)a) | (~take & (vu)b));
}

static inline vf low_half(vu pair) { return (vf)(pair << 16); }
static inline vf high_half(vu pair) { return (vf)(pair & 0xffff0000u); }

/* Round to nearest even; a NaN stays one. */
static inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_bfloat16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline float sum_of(vf v) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}

/* Powers of two by exponent bits and a polynomial; relative error below 2e-7 (Cephes expf). */
static inline float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float n = floorf(x * 1.44269504f + 0.5f);
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return p * power;
}

/* ---- inputs of products ----
 * float32: as they are. bfloat16 with the dot product instruction: as bfloat16. Otherwise: float32
 * of the rounded value, even places of 2 * LANES before odd ones, as a weight's halves come apart.
 */

static inline int64_t packed_bytes(int kind, int64_t count) {
#if defined(__AVX512BF16__)
  if (kind == BFLOAT16) return count * 2;
#endif
  (void)kind;
  return count * 4;
}

static inline void pack(int kind, const float *in, int64_t count, char *out) {
  if (kind == FLOAT32) {
    memcpy(out, in, (size_t)count * 4);
    return;
  }
#if defined(__AVX512BF16__)
  uint16_t *half = (uint16_t *)out;
  for (int64_t i = 0; i < count; i++) half[i] = to_bfloat16(in[i]);
#else
  float *apart = (float *)out;
  for (int64_t i = 0; i < count; i += 2 * LANES)
    for (int j = 0; j < LANES; j++) {
      apart[i + j] = from_bfloat16(to_bfloat16(in[i + 2 * j]));
      apart[i + LANES + j] = from_bfloat16(to_bfloat16(in[i + 2 * j + 1]));
    }
#endif
}

/* ---- products: out[j][i] = weight row i . input row j, for up to 4 by 4 ---- */

#define INLINE static inline __attribute__((always_inline))

#if LANES == 16 && defined(__AVX512BF16__)
INLINE __m128 sums_of(const vf a[4]) {
  __m256 b[4];
  for (int i = 0; i < 4; i++)
    b[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)a[i]),
                         _mm512_extractf32x8_ps((__m512)a[i], 1));
  __m256 c = _mm256_hadd_ps(_mm256_hadd_ps(b[0], b[1]), _mm256_hadd_ps(b[2], b[3]));
  return _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
}
#endif

/* What comes next: `rows` weight rows from `at`, fetched while a tile is computed. */
typedef struct {
  const char *at;
  int64_t rows;
} Ahead;

INLINE void fetch(Ahead ahead, int64_t row_bytes, int64_t offset) {
  for (int64_t i = 0; i < ahead.rows; i++) __builtin_prefetch(ahead.at + i * row_bytes + offset);
}

INLINE void tile(int kind, const int m, const char *const w[4], Ahead ahead, const char *x,
                 int64_t x_stride, int64_t k, float *out, int64_t out_stride) {
  vf acc[4][4];
  for (int j = 0; j < m; j++)
    for (int i = 0; i < 4; i++) acc[j][i] = splat(0);
  if (kind == FLOAT32) {
    for (int64_t at = 0; at < k; at += LANES) {
      fetch(ahead, 4 * k, 4 * at);
      vf wv[4];
      for (int i = 0; i < 4; i++) wv[i] = *(const vf_any *)(w[i] + 4 * at);
      for (int j = 0; j < m; j++) {
        vf xv = *(const vf_any *)(x + j * x_stride + 4 * at);
        for (int i = 0; i < 4; i++) acc[j][i] += wv[i] * xv;
      }
    }
  } else {
#if defined(__AVX512BF16__)
    for (int64_t at = 0; at < k; at += 32) {
      fetch(ahead, 2 * k, 2 * at);
      __m512bh wv[4];
      for (int i = 0; i < 4; i++) wv[i] = (__m512bh)_mm512_loadu_si512(w[i] + 2 * at);
      for (int j = 0; j < m; j++) {
        __m512bh xv = (__m512bh)_mm512_loadu_si512(x + j * x_stride + 2 * at);
        for (int i = 0; i < 4; i++)
          acc[j][i] = (vf)_mm512_dpbf16_ps((__m512)acc[j][i], wv[i], xv);
      }
    }
#else
    for (int64_t at = 0; at < k; at += 2 * LANES) {
      fetch(ahead, 2 * k, 2 * at);
      vf even[4], odd[4];
      for (int i = 0; i < 4; i++) {
        vu pair = *(const vu_any *)(w[i] + 2 * at);
        even[i] = low_half(pair);
        odd[i] = high_half(pair);
      }
      for (int j = 0; j < m; j++) {
        vf x0 = *(const vf_any *)(x + j * x_stride + 4 * at);
        vf x1 = *(const vf_any *)(x + j * x_stride + 4 * (at + LANES));
        for (int i = 0; i < 4; i++) {
          acc[j][i] += even[i] * x0;
          acc[j][i] += odd[i] * x1;
        }
      }
    }
#endif
  }
  for (int j = 0; j < m; j++) {
#if LANES == 16 && defined(__AVX512BF16__)
    _mm_storeu_ps(out + j * out_stride, sums_of(acc[j]));
#else
    for (int i = 0; i < 4; i++) out[j * out_stride + i] = sum_of(acc[j][i]);
#endif
  }
}

INLINE void tile_of(int kind, int64_t m, const char *const w[4], Ahead ahead, const char *x,
                    int64_t x_stride, int64_t k, float *out, int64_t out_stride) {
  switch (m) {
    case 1: tile(kind, 1, w, ahead, x, x_stride, k, out, out_stride); break;
    case 2: tile(kind, 2, w, ahead, x, x_stride, k, out, out_stride); break;
    case 3: tile(kind, 3, w, ahead, x, x_stride, k, out, out_stride); break;
    default: tile(kind, 4, w, ahead, x, x_stride, k, out, out_stride); break;
  }
}

/* The weight rows behind `w`, if wanted, are fetched evenly over the tiles. */
INLINE void multiply_tile(int kind, const char *const w[4], int64_t whole, int ahead,
                          const char *x, int64_t rows, int64_t k, float *out,
                          int64_t out_stride) {
  int64_t x_stride = packed_bytes(kind, k), row_bytes = k * (kind == BFLOAT16 ? 2 : 4);
  int64_t tiles = (rows + 3) / 4, each = (4 + tiles - 1) / tiles, fetched = ahead ? 0 : 4;
  for (int64_t row = 0; row < rows; row += 4) {
    int64_t m = rows - row < 4 ? rows - row : 4;
    Ahead next = {w[0] + (4 + fetched) * row_bytes, fetched < 4 ? each : 0};
    fetched += each;
    float sums[16];
    tile_of(kind, m, w, next, x + row * x_stride, x_stride, k, sums, 4);
    for (int64_t j = 0; j < m; j++)
      memcpy(out + (row + j) * out_stride, sums + 4 * j, (size_t)whole * 4);
  }
}

/* out[row][0..count) = weight rows first.. . packed input rows, in tiles of 4 by 4. As many input
 * rows at a time as stay in the nearest cache, for all the weight rows. */
static void multiply(int kind, const void *weight, int64_t first, int64_t count, const char *x,
                     int64_t rows, int64_t k, float *out, int64_t out_stride) {
  int64_t item = kind == BFLOAT16 ? 2 : 4, x_stride = packed_bytes(kind, k);
  int64_t some = NEAR_BYTES / x_stride / 4 * 4;
  if (some < 4) some = 4;
  for (int64_t row = 0; row < rows; row += some) {
    int64_t now = rows - row < some ? rows - row : some;
    for (int64_t n = 0; n < count; n += 4) {
      const char *w[4];
      int64_t whole = count - n < 4 ? count - n : 4;
      for (int i = 0; i < 4; i++)
        w[i] = (const char *)weight + (first + n + (i < whole ? i : whole - 1)) * k * item;
      if (kind == BFLOAT16)
        multiply_tile(BFLOAT16, w, whole, row == 0, x + row * x_stride, now, k,
                      out + row * out_stride + n, out_stride);
      else
        multiply_tile(FLOAT32, w, whole, row == 0, x + row * x_stride, now, k,
                      out + row * out_stride + n, out_stride);
    }
  }
}

/* ---- threads ----
 * The caller is thread 0. Work inside a phase is taken in chunks from a shared counter, so a
 * thread that the system has put aside delays the others by one chunk and no more.
 */

typedef struct Crew Crew;

typedef struct {
  Crew *crew;
  int64_t number;
  float *scores; /* [group, seen] */
  int64_t scores_room;
} Worker;

struct Crew {
  int64_t threads;
  pthread_t *handles;
  Worker *workers;
  atomic_long round; /* counts steps; workers sleep until it moves */
  pthread_mutex_t lock;
  pthread_cond_t moved;
  int leaving;
  atomic_long arrived, passed; /* of the barrier */
  atomic_long cursor[3];
  const Model *model;
  const Step *step;
  /* Room for the activations of a step. */
  int64_t room;
  char *memory;
  char *packed, *packed_inner, *packed_heads;
  float *qkv, *part;
};

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

static void barrier(Crew *crew) {
  if (crew->threads == 1) return;
  long passed = atomic_load(&crew->passed);
  if (atomic_fetch_add(&crew->arrived, 1) == crew->threads - 1) {
    atomic_store(&crew->arrived, 0);
    atomic_store(&crew->passed, passed + 1);
    return;
  }
  for (int spins = 0; atomic_load_explicit(&crew->passed, memory_order_acquire) == passed; spins++)
    if (spins < SPINS) relax();
    else sched_yield();
}

/* A phase's counter is free again two phases later: the barrier between keeps users apart. */
typedef struct {
  Worker *worker;
  int64_t phase;
} Course;

static inline int64_t take(Course *course, int64_t amount) {
  return atomic_fetch_add(&course->worker->crew->cursor[course->phase % 3], amount);
}

static void next_phase(Course *course) {
  Crew *crew = course->worker->crew;
  barrier(crew);
  course->phase++;
  /* Everyone has left the phase before the last; its counter serves the phase after this. */
  if (course->worker->number == 0) atomic_store(&crew->cursor[(course->phase + 1) % 3], 0);
}

/* ---- one step ---- */

static void norm_row(const float *in, const float *weight, int64_t count, float eps, float *out) {
  vf squares = splat(0);
  for (int64_t i = 0; i < count; i += LANES) {
    vf v = *(const vf_any *)(in + i);
    squares += v * v;
  }
  float factor = 1.0f / sqrtf(sum_of(squares) / (float)count + eps);
  for (int64_t i = 0; i < count; i += LANES)
    *(vf_any *)(out + i) =
        *(const vf_any *)(weight + i) * (*(const vf_any *)(in + i) * splat(factor));
}

/* Packs the norm of rows first, first + stride, ... of `hidden`. */
static void norm_rows(Course *course, const float *weight, const int32_t *rows, int64_t count) {
  Crew *crew = course->worker->crew;
  const Model *model = crew->model;
  float row[model->width];
  for (int64_t i = take(course, 1); i < count; i = take(course, 1)) {
    const float *in = crew->step->hidden + (rows ? rows[i] : i) * model->width;
    norm_row(in, weight, model->width, model->eps, row);
    pack((int)model->kind, row, model->width,
         crew->packed + i * packed_bytes((int)model->kind, model->width));
  }
  next_phase(course);
}

static void add_bias(float *out, const float *bias, int64_t first, int64_t count, int64_t rows,
                     int64_t stride) {
  for (int64_t row = 0; bias && row < rows; row++)
    for (int64_t i = 0; i < count; i++) out[row * stride + i] += bias[first + i];
}

static void project_qkv(Course *course, const Layer *layer) {
  Crew *crew = course->worker->crew;
  const Model *m = crew->model;
  int64_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim, all = q + 2 * kv;
  for (int64_t n = take(course, CHUNK); n < all; n = take(course, CHUNK)) {
    const void *weight = n < q ? layer->q : n < q + kv ? layer->k : layer->v;
    const float *bias = n < q ? layer->q_bias : n < q + kv ? layer->k_bias : layer->v_bias;
    int64_t first = n < q ? n : n < q + kv ? n - q : n - q - kv;
    multiply((int)m->kind, weight, first, CHUNK, crew->packed, crew->step->rows, m->width,
             crew->qkv + n, all);
    add_bias(crew->qkv + n, bias, first, CHUNK, crew->step->rows, all);
  }
  next_phase(course);
}

/* Halves turned against each other, as Llama's rotate_half does. */
static void rotate(float *head, const float *cos, const float *sin, int64_t size) {
  int64_t half = size / 2;
  for (int64_t i = 0; i < half; i++) {
    float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

/* A block's keys or values of one head. */
static inline char *block_of(const Crew *crew, int64_t layer, int64_t value, int64_t block,
                             int64_t head) {
  const Model *m = crew->model;
  int64_t line = ((layer * 2 + value) * crew->step->blocks + block) * m->kv_heads + head;
  return (char *)crew->step->pool + line * BLOCK * m->head_dim * (m->kind == BFLOAT16 ? 2 : 4);
}

static void store_key(const Crew *crew, int64_t layer, int64_t slot, int64_t head,
                      const float *in) {
  int64_t d = crew->model->head_dim, t = slot % BLOCK;
  char *block = block_of(crew, layer, 0, slot / BLOCK, head);
  if (crew->model->kind == FLOAT32)
    for (int64_t i = 0; i < d; i++) ((float *)block)[i * BLOCK + t] = in[i];
  else
    for (int64_t i = 0; i < d; i++)
      ((uint16_t *)block)[(i / 2 * BLOCK + t) * 2 + i % 2] = to_bfloat16(in[i]);
}

static void store_value(const Crew *crew, int64_t layer, int64_t slot, int64_t head,
                        const float *in) {
  int64_t d = crew->model->head_dim, t = slot % BLOCK;
  char *block = block_of(crew, layer, 1, slot / BLOCK, head);
  if (crew->model->kind == FLOAT32)
    memcpy(block + t * d * 4, in, (size_t)d * 4);
  else
    for (int64_t i = 0; i < d; i++)
      ((uint16_t *)block)[(t / 2 * d + i) * 2 + t % 2] = to_bfloat16(in[i]);
}

/* Turns a row's queries and key of one key head, and stores its key and value. */
static void store_keys(Course *course, int64_t number, const Layer *layer) {
  Crew *crew = course->worker->crew;
  const Model *m = crew->model;
  const Step *step = crew->step;
  int64_t d = m->head_dim, group = m->heads / m->kv_heads;
  int64_t all = (m->heads + 2 * m->kv_heads) * d, count = step->rows * m->kv_heads;
  for (int64_t item = take(course, 1); item < count; item = take(course, 1)) {
    int64_t row = item / m->kv_heads, head = item % m->kv_heads;
    float *qkv = crew->qkv + row * all;
    for (int64_t i = 0; i <= group; i++) {
      int64_t at = i < group ? head * group + i : m->heads + head;
      const float *norm = i < group ? layer->q_norm : layer->k_norm;
      if (norm) norm_row(qkv + at * d, norm, d, m->eps, qkv + at * d);
      rotate(qkv + at * d, step->cos + row * d, step->sin + row * d, d);
    }
    store_key(crew, number, step->slots[row], head, qkv + (m->heads + head) * d);
    store_value(crew, number, step->slots[row], head, qkv + (m->heads + m->kv_heads + head) * d);
  }
  next_phase(course);
}

static inline int64_t block_at(const Step *step, int64_t row, int64_t number) {
  return step->tables[row * step->table_width + number];
}

/* Two bfloat16 side by side, the first in the low half. */
static inline uint32_t pair_of(float first, float second) {
  return (uint32_t)to_bfloat16(second) << 16 | to_bfloat16(first);
}

/* sum + the products of a vector of pairs with one pair. */
INLINE vf add_pairs(vf sum, vu pairs, uint32_t by) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)by));
#else
  float first = from_bfloat16((uint16_t)by), second = from_bfloat16((uint16_t)(by >> 16));
  return sum + low_half(pairs) * splat(first) + high_half(pairs) * splat(second);
#endif
}

/* scores[j][t] of up to 4 query heads over one row's sequence, in whole blocks.
 * queries: float32 [m][head_dim], or bfloat16 pairs [m][head_dim / 2]. */
INLINE void score(int kind, const Crew *crew, int64_t layer, int64_t row, int64_t head,
                  const void *queries, const int m, float *scores, int64_t stride) {
  int64_t seen = crew->step->seen[row], d = crew->model->head_dim;
  int64_t steps = kind == BFLOAT16 ? d / 2 : d;
  for (int64_t begin = 0; begin < seen; begin += BLOCK) {
    const char *keys = block_of(crew, layer, 0, block_at(crew->step, row, begin / BLOCK), head);
    vf sums[4][PARTS];
    for (int j = 0; j < m; j++)
      for (int p = 0; p < PARTS; p++) sums[j][p] = splat(0);
    for (int64_t i = 0; i < steps; i++)
      for (int p = 0; p < PARTS; p++) {
        const char *at = keys + (i * BLOCK + p * LANES) * 4;
        for (int j = 0; j < m; j++)
          if (kind == BFLOAT16)
            sums[j][p] = add_pairs(sums[j][p], *(const vu_any *)at,
                                   ((const uint32_t *)queries)[j * steps + i]);
          else
            sums[j][p] +=
                *(const vf_any *)at * splat(((const float *)queries)[j * steps + i]);
      }
    for (int j = 0; j < m; j++)
      for (int p = 0; p < PARTS; p++)
        *(vf_any *)(scores + j * stride + begin + p * LANES) = sums[j][p];
  }
}

/* Of the scores in whole blocks; those behind `seen` come to weigh nothing. */
static void softmax(float *scores, int64_t seen, float scale) {
  int64_t whole = (seen + BLOCK - 1) / BLOCK * BLOCK;
  for (int64_t t = seen; t < whole; t++) scores[t] = -INFINITY;
  vf most = splat(-INFINITY), total = splat(0);
  for (int64_t t = 0; t < whole; t += LANES) {
    vf v = *(vf_any *)(scores + t) * splat(scale);
    *(vf_any *)(scores + t) = v;
    most = larger(v, most);
  }
  float top = most[0];
  for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
  for (int64_t t = 0; t < whole; t++) scores[t] = exp_of(scores[t] - top);
  for (int64_t t = seen; t < whole; t++) scores[t] = 0;
  for (int64_t t = 0; t < whole; t += LANES) total += *(vf_any *)(scores + t);
  vf share = splat(1.0f / sum_of(total));
  for (int64_t t = 0; t < whole; t += LANES) *(vf_any *)(scores + t) *= share;
}

/* out[j][i] = the sum over t of scores[j][t] * value[t][i], 2 * LANES elements of i at a time. */
INLINE void weigh(int kind, const Crew *crew, int64_t layer, int64_t row, int64_t head,
                  const float *scores, int64_t stride, const int m, float *out) {
  int64_t seen = crew->step->seen[row], d = crew->model->head_dim;
  for (int64_t i = 0; i < d; i += 2 * LANES) {
    vf sums[4][2];
    for (int j = 0; j < m; j++) sums[j][0] = sums[j][1] = splat(0);
    for (int64_t begin = 0; begin < seen; begin += BLOCK) {
      const char *values = block_of(crew, layer, 1, block_at(crew->step, row, begin / BLOCK), head);
      int64_t count = seen - begin < BLOCK ? seen - begin : BLOCK;
      for (int64_t t = 0; t < count; t += kind == BFLOAT16 ? 2 : 1) {
        const char *at = values + ((kind == BFLOAT16 ? t / 2 : t) * d + i) * 4;
        for (int j = 0; j < m; j++) {
          const float *weight = scores + j * stride + begin + t;
          for (int p = 0; p < 2; p++)
            if (kind == BFLOAT16)
              sums[j][p] = add_pairs(sums[j][p], *(const vu_any *)(at + p * LANES * 4),
                                     ((const uint32_t *)weight)[0]);
            else
              sums[j][p] += *(const vf_any *)(at + p * LANES * 4) * splat(weight[0]);
        }
      }
    }
    for (int j = 0; j < m; j++)
      for (int p = 0; p < 2; p++) *(vf_any *)(out + j * d + i + p * LANES) = sums[j][p];
  }
}

/* The weights of two tokens become one pair, in the place of the first's. */
static void pair_up(float *scores, int64_t seen) {
  int64_t whole = (seen + BLOCK - 1) / BLOCK * BLOCK;
  for (int64_t t = 0; t < whole; t += 2) {
    uint32_t pair = pair_of(scores[t], scores[t + 1]);
    memcpy(scores + t, &pair, 4);
  }
}

INLINE void attend_with(int kind, const Crew *crew, float *scores, int64_t stride, int64_t layer,
                        int64_t row, int64_t head, const void *queries, const int m, float *out) {
  score(kind, crew, layer, row, head, queries, m, scores, stride);
  for (int j = 0; j < m; j++) {
    softmax(scores + j * stride, crew->step->seen[row], crew->model->scale);
    if (kind == BFLOAT16) pair_up(scores + j * stride, crew->step->seen[row]);
  }
  weigh(kind, crew, layer, row, head, scores, stride, m, out);
}

#define ATTEND(kind, m) \
  attend_with(kind, crew, worker->scores, worker->scores_room, layer, row, head, queries, m, out)

/* Up to 4 query heads, from `first`, of one row. */
static void attend_heads(Worker *worker, int64_t layer, int64_t row, int64_t head, int64_t first,
                         int64_t m) {
  const Crew *crew = worker->crew;
  const Model *model = crew->model;
  int64_t d = model->head_dim, all = (model->heads + 2 * model->kv_heads) * d;
  const float *in = crew->qkv + row * all + first * d;
  float out[4 * d];
  uint32_t pairs[2 * d];
  for (int64_t i = 0; i < m * d / 2; i++) pairs[i] = pair_of(in[2 * i], in[2 * i + 1]);
  const void *queries = model->kind == BFLOAT16 ? (const void *)pairs : (const void *)in;
  switch (model->kind * 4 + m) {
    case FLOAT32 * 4 + 1: ATTEND(FLOAT32, 1); break;
    case FLOAT32 * 4 + 2: ATTEND(FLOAT32, 2); break;
    case FLOAT32 * 4 + 3: ATTEND(FLOAT32, 3); break;
    case FLOAT32 * 4 + 4: ATTEND(FLOAT32, 4); break;
    case BFLOAT16 * 4 + 1: ATTEND(BFLOAT16, 1); break;
    case BFLOAT16 * 4 + 2: ATTEND(BFLOAT16, 2); break;
    case BFLOAT16 * 4 + 3: ATTEND(BFLOAT16, 3); break;
    default: ATTEND(BFLOAT16, 4); break;
  }
  pack((int)model->kind, out, m * d,
       crew->packed_heads + packed_bytes((int)model->kind, (row * model->heads + first) * d));
}

static void attend(Course *course, int64_t layer) {
  Crew *crew = course->worker->crew;
  const Model *m = crew->model;
  int64_t group = m->heads / m->kv_heads, count = crew->step->rows * m->kv_heads;
  for (int64_t item = take(course, 1); item < count; item = take(course, 1)) {
    int64_t row = item / m->kv_heads, head = item % m->kv_heads;
    for (int64_t first = 0; first < group; first += 4)
      attend_heads(course->worker, layer, row, head, head * group + first,
                   group - first < 4 ? group - first : 4);
  }
  next_phase(course);
}

/* hidden += weight . packed input */
static void project_back(Course *course, const void *weight, const char *in, int64_t k) {
  Crew *crew = course->worker->crew;
  const Model *m = crew->model;
  int64_t rows = crew->step->rows;
  for (int64_t n = take(course, CHUNK); n < m->width; n = take(course, CHUNK)) {
    float *part = crew->part + n;
    multiply((int)m->kind, weight, n, CHUNK, in, rows, k, part, m->width);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < CHUNK; i++)
        crew->step->hidden[row * m->width + n + i] += part[row * m->width + i];
  }
  next_phase(course);
}

static void gate_and_up(Course *course, const Layer *layer) {
  Crew *crew = course->worker->crew;
  const Model *m = crew->model;
  int64_t rows = crew->step->rows, bytes = packed_bytes((int)m->kind, m->inner);
  float gates[CHUNK * SOME_ROWS], ups[CHUNK * SOME_ROWS];
  for (int64_t n = take(course, CHUNK); n < m->inner; n = take(course, CHUNK))
    for (int64_t row = 0; row < rows; row += SOME_ROWS) {
      int64_t some = rows - row < SOME_ROWS ? rows - row : SOME_ROWS;
      const char *x = crew->packed + row * packed_bytes((int)m->kind, m->width);
      multiply((int)m->kind, layer->gate, n, CHUNK, x, some, m->width, gates, CHUNK);
      multiply((int)m->kind, layer->up, n, CHUNK, x, some, m->width, ups, CHUNK);
      for (int64_t i = 0; i < some * CHUNK; i++)
        gates[i] = gates[i] / (1.0f + exp_of(-gates[i])) * ups[i];
      for (int64_t j = 0; j < some; j++)
        pack((int)m->kind, gates + j * CHUNK, CHUNK,
             crew->packed_inner + (row + j) * bytes + packed_bytes((int)m->kind, n));
    }
  next_phase(course);
}

static void predict(Course *course) {
  Crew *crew = course->worker->crew;
  const Model *m = crew->model;
  const Step *step = crew->step;
  norm_rows(course, m->norm, step->picked, step->picked_count);
  for (int64_t n = take(course, CHUNK); n < m->vocab; n = take(course, CHUNK))
    multiply((int)m->kind, m->head, n, m->vocab - n < CHUNK ? m->vocab - n : CHUNK, crew->packed,
             step->picked_count, m->width, step->logits + n, m->vocab);
  next_phase(course);
  for (int64_t row = take(course, 1); row < step->picked_count; row = take(course, 1)) {
    const float *logits = step->logits + row * m->vocab;
    float most = -INFINITY, zero = 0;
    int32_t best = 0;
    vf zeros = splat(0);
    int64_t whole = m->vocab / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) zeros += *(const vf_any *)(logits + i) * splat(0);
    for (int64_t i = whole; i < m->vocab; i++) zero += logits[i] * 0.0f;
    zero += sum_of(zeros);
    for (int64_t i = 0; i < m->vocab; i++)
      if (logits[i] > most) {
        most = logits[i];
        best = (int32_t)i;
      }
    step->best[row] = best;
    step->finite[row] = zero == 0.0f;
  }
  next_phase(course);
}

static void run_layers(Worker *worker) {
  Crew *crew = worker->crew;
  const Model *m = crew->model;
  Course course = {worker, 0};
  for (int64_t i = 0; i < m->layers; i++) {
    const Layer *layer = m->layer + i;
    norm_rows(&course, layer->input_norm, NULL, crew->step->rows);
    project_qkv(&course, layer);
    store_keys(&course, i, layer);
    attend(&course, i);
    project_back(&course, layer->o, crew->packed_heads, m->heads * m->head_dim);
    norm_rows(&course, layer->post_norm, NULL, crew->step->rows);
    gate_and_up(&course, layer);
    project_back(&course, layer->down, crew->packed_inner, m->inner);
  }
  if (crew->step->picked_count) predict(&course);
  /* Nobody may still count when the next step sets the counters back. */
  barrier(crew);
}

/* ---- life ---- */

static void *live(void *argument) {
  Worker *worker = argument;
  Crew *crew = worker->crew;
  long seen = 0;
  for (;;) {
    for (int spins = 0; spins < SPINS && atomic_load(&crew->round) == seen; spins++) relax();
    pthread_mutex_lock(&crew->lock);
    while (atomic_load(&crew->round) == seen && !crew->leaving)
      pthread_cond_wait(&crew->moved, &crew->lock);
    int leaving = crew->leaving;
    pthread_mutex_unlock(&crew->lock);
    if (leaving) return NULL;
    seen = atomic_load(&crew->round);
    run_layers(worker);
  }
}

/* The best of the builds plain, avx2, avx512 and avx512bf16 that this processor runs, from 0. */
int chiasm_best_build(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return 1;
  return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
  return 0;
#endif
}

/* Bytes of Layer, Model and Step: library.py must lay them out alike. */
void chiasm_sizes(int64_t sizes[3]) {
  sizes[0] = sizeof(Layer);
  sizes[1] = sizeof(Model);
  sizes[2] = sizeof(Step);
}

Crew *chiasm_crew_new(int64_t threads) {
  Crew *crew = calloc(1, sizeof *crew);
  if (!crew) return NULL;
  crew->threads = threads;
  crew->workers = calloc((size_t)threads, sizeof *crew->workers);
  crew->handles = calloc((size_t)threads, sizeof *crew->handles);
  pthread_mutex_init(&crew->lock, NULL);
  pthread_cond_init(&crew->moved, NULL);
  for (int64_t i = 0; i < threads; i++) crew->workers[i] = (Worker){crew, i, NULL, 0};
  for (int64_t i = 1; i < threads; i++)
    if (pthread_create(&crew->handles[i], NULL, live, &crew->workers[i])) {
      crew->threads = i;
      break;
    }
  return crew;
}

void chiasm_crew_free(Crew *crew) {
  pthread_mutex_lock(&crew->lock);
  crew->leaving = 1;
  pthread_cond_broadcast(&crew->moved);
  pthread_mutex_unlock(&crew->lock);
  for (int64_t i = 1; i < crew->threads; i++) pthread_join(crew->handles[i], NULL);
  for (int64_t i = 0; i < crew->threads; i++) free(crew->workers[i].scores);
  free(crew->workers);
  free(crew->handles);
  free(crew->memory);
  free(crew);
}

/* Room for a step's activations; grown, never shrunk. False: no memory. */
static int make_room(Crew *crew, const Model *m, const Step *step) {
  int64_t widest = m->width > m->heads * m->head_dim ? m->width : m->heads * m->head_dim;
  int64_t qkv = (m->heads + 2 * m->kv_heads) * m->head_dim;
  int64_t room = step->rows * 4 * (2 * widest + m->inner + qkv + m->width);
  if (room > crew->room) {
    free(crew->memory);
    crew->room = 0;
    crew->memory = malloc((size_t)room);
    if (!crew->memory) return 0;
    crew->room = room;
  }
  crew->packed = crew->memory;
  crew->packed_heads = crew->packed + step->rows * 4 * widest;
  crew->packed_inner = crew->packed_heads + step->rows * 4 * widest;
  crew->qkv = (float *)(crew->packed_inner + step->rows * 4 * m->inner);
  crew->part = crew->qkv + step->rows * qkv;
  int64_t longest = 0;
  for (int64_t row = 0; row < step->rows; row++)
    longest = step->seen[row] > longest ? step->seen[row] : longest;
  longest = (longest + BLOCK - 1) / BLOCK * BLOCK;
  for (int64_t i = 0; i < crew->threads; i++) {
    Worker *worker = &crew->workers[i];
    if (longest <= worker->scores_room) continue;
    free(worker->scores);
    worker->scores_room = 0;
    worker->scores = malloc((size_t)longest * 4 * 4);
    if (!worker->scores) return 0;
    worker->scores_room = longest;
  }
  return 1;
}

/* Computes a step on all threads of the crew; 0 where there was no memory for it. */
int chiasm_step(Crew *crew, const Model *model, const Step *step) {
  if (!make_room(crew, model, step)) return 0;
  crew->model = model;
  crew->step = step;
  for (int i = 0; i < 3; i++) atomic_store(&crew->cursor[i], 0);
  if (crew->threads > 1) {
    pthread_mutex_lock(&crew->lock);
    atomic_fetch_add(&crew->round, 1);
    pthread_cond_broadcast(&crew->moved);
    pthread_mutex_unlock(&crew->lock);
  }
  run_layers(&crew->workers[0]);
  return 1;
}
