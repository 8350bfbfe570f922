// Attention, backward: probabilities are computed again, from the rows' maxima and sums (Dao et al., 2022).
// The rows of a head are cut in pieces; a piece's gradient of the query is its own, and those of key and value are
// summed over the pieces in the memory of one thread, or written at once where there is one piece.  Threads share a
// head where there are too few; their sums are added in order.

namespace sdpa_rewrite {

template <class T, class TO>
struct Backward {
  Sizes size;
  Operand<const T> query, key, value;
  Operand<const TO> out, grad;
  const float *maximum, *sum; // [batch, heads, group, rows]
  const float* grad_sum;      // the same, or null
  Operand<T> grad_query, grad_key, grad_value;
  float scale;
  bool safe;
  int threads;
};

constexpr int64_t ROWS = 256; // of a piece

template <class T, class TO, class P>
class BackwardThread {
  static constexpr bool DOT = HAS_DOT && std::is_same_v<T, c10::BFloat16>;
  const Backward<T, TO>& call;
  const P& program;
  const Sizes& size;
  int64_t depth, width;           // padded floats of a row of query and of the output
  int64_t depth_words, width_words; // words between packed rows
  Workspace space;
  TilesOfThread tiles;
  float *query, *grad, *query_right, *grad_right, *few_query, *few_grad, *grad_query, *delta, *maximum, *inverse;
  float *key, *key_right, *value, *packing, *tile_key, *tile_value;
  float *scores, *raw, *probability, *slope, *left, *turned, *factor, *scratch;
  float* learned;

 public:
  BackwardThread(const Backward<T, TO>& c, const P& p, int64_t most, float* accumulators)
      : call(c), program(p), size(c.size), depth(round_up(c.size.depth, W)), width(round_up(c.size.width, W)),
        depth_words(DOT ? words<DOT>(c.size.depth) : depth), width_words(DOT ? words<DOT>(c.size.width) : width),
        space(most * (depth_words + width_words + 2 * depth + width + 3) +
              TILE * (3 * depth + 2 * width + std::max(depth, width)) + FEW * (depth + width) + 7 * STEP * TILE +
              (HAS_TILES ? TILE * TILE : 0) + p.scratch() + 512),
        learned(accumulators) {
    query = space.take(most * depth_words);
    grad = space.take(most * width_words);
    query_right = DOT ? space.take(words<DOT>(most) * depth) : query;
    grad_right = DOT ? space.take(words<DOT>(most) * width) : grad;
    few_query = DOT ? space.take(FEW * depth) : query;
    few_grad = DOT ? space.take(FEW * width) : grad;
    grad_query = space.take(most * depth);
    delta = space.take(most);
    maximum = space.take(most);
    inverse = space.take(most);
    key = space.take(TILE * depth);
    key_right = space.take(TILE * depth);
    value = space.take(TILE * width);
    packing = space.take(TILE * std::max(depth, width));
    tile_key = space.take(TILE * depth);
    tile_value = space.take(TILE * width);
    scores = space.take(STEP * TILE);
    raw = space.take(STEP * TILE);
    slope = space.take(STEP * TILE);
    probability = space.take(STEP * TILE);
    left = space.take(STEP * TILE);
    turned = HAS_TILES ? space.take(TILE * TILE) : left;
    factor = space.take(STEP * TILE);
    scratch = space.take(p.scratch());
  }

  // The rows of `t`: the gradient of the query is written.  Those of key and value are added to sums, or, where there
  // are none, written: `t` is then all that there is of its head.
  void run(const Tile& t, float* key_sums, float* value_sums) {
    const bool few_rows = !key_sums && t.rows <= FEW;
    const bool skipping = prepare(t, few_rows);
    for (int64_t column = 0; column < size.columns; column += TILE) {
      const Tile all = part(t, 0, t.rows, column, std::min(TILE, size.columns - column));
      if (key_sums) {
        columns(all, skipping, key_sums + column * depth, value_sums + column * width);
      } else if (few_rows) {
        few(all, skipping);
        write(t.b, t.h, column, all.columns, tile_key, tile_value);
      } else {
        std::fill_n(tile_key, all.columns * depth, 0.0f);
        std::fill_n(tile_value, all.columns * width, 0.0f);
        columns(all, skipping, tile_key, tile_value);
        write(t.b, t.h, column, all.columns, tile_key, tile_value);
      }
    }
    for (int64_t r = 0; r < t.rows; ++r) {
      write(grad_query + r * depth, call.grad_query.at(t.b, t.h, t.g(r), t.i(r)), call.grad_query.column, size.depth);
    }
  }

  // The gradients of a tile of keys and values of a head.
  void write(int64_t b, int64_t h, int64_t column, int64_t columns, const float* key_sums, const float* value_sums) {
    write(key_sums, depth, call.grad_key.at(b, h, 0, column), call.grad_key, columns, size.depth);
    write(value_sums, width, call.grad_value.at(b, h, 0, column), call.grad_value, columns, size.width);
  }

 private:
  void write(const float* from, int64_t step, T* to, const Operand<T>& like, int64_t rows, int64_t n) {
    if (like.column != 1 && like.row == 1) { // transposed in memory
      transpose(from, step, rows, n, packing);
      for (int64_t k = 0; k < n; ++k) scaled(packing + k * TILE, to + k * like.column, rows, 1.0f);
    } else {
      for (int64_t r = 0; r < rows; ++r) write(from + r * step, to + r * like.row, like.column, n);
    }
  }

  static void write(const float* from, T* to, int64_t stride, int64_t n) {
    if (stride == 1) scaled(from, to, n, 1.0f);
    else for (int64_t k = 0; k < n; ++k) to[k * stride] = T(from[k]);
  }

  // A tile of keys, with all rows of a piece.
  void columns(const Tile& t, bool skipping, float* key_sums, float* value_sums) {
    if (skipping && program.block(t) == Block::hidden) return;
    pack(t, t.column, t.columns);
    for (int64_t r = 0; r < t.rows; r += STEP) {
      const Tile some = part(t, r, std::min(STEP, t.rows - r), t.column, t.columns);
      const Block kind = program.block(some);
      if (kind == Block::hidden && skipping) continue;
      step(some, kind == Block::hidden ? Block::mixed : kind, key_sums, value_sums);
    }
  }

  // Reads what belongs to rows.  Returns whether what is hidden from all of them can be skipped.
  bool prepare(const Tile& t, bool few_rows) {
    bool skipping = true;
    for (int64_t r = 0; r < t.rows; ++r) {
      const int64_t g = t.g(r), i = t.i(r), at = ((t.b * size.heads + t.h) * size.group + g) * size.rows + i;
      float *q = query + r * depth_words, *o = grad + r * width_words;
      const T* from = call.query.at(t.b, t.h, g, i);
      const TO* slopes = call.grad.at(t.b, t.h, g, i);
      pack_row<DOT>(from, call.query.column, size.depth, q);
      pack_row<DOT>(slopes, call.grad.column, size.width, o);
      if constexpr (!DOT) {
        std::fill(q + size.depth, q + depth, 0.0f);
        std::fill(o + size.width, o + width, 0.0f);
      } else if (few_rows) {
        float_rows(from, 0, call.query.column, 1, size.depth, few_query + r * depth);
        float_rows(slopes, 0, call.grad.column, 1, size.width, few_grad + r * width);
      }
      const bool empty = call.maximum[at] == -INFINITE;
      maximum[r] = empty ? 0.0f : call.maximum[at];
      inverse[r] = empty && call.safe ? 0.0f : 1.0f / call.sum[at];
      delta[r] = P::sums_rows ? 0.0f : dot(call.out.at(t.b, t.h, g, i), call.grad.at(t.b, t.h, g, i));
      if (call.grad_sum) delta[r] -= call.sum[at] * call.grad_sum[at];
      if (empty ? !call.safe : call.maximum[at] <= P::floor) skipping = false;
    }
    if constexpr (DOT) {
      pack_right<DOT>(reinterpret_cast<T*>(query), 2 * depth_words, 1, t.rows, size.depth, depth, query_right);
      pack_right<DOT>(reinterpret_cast<T*>(grad), 2 * width_words, 1, t.rows, size.width, width, grad_right);
    }
    std::fill_n(grad_query, t.rows * depth, 0.0f);
    if constexpr (P::sums_rows) settle(t, skipping, few_rows);
    return skipping;
  }

  // A row's sum of probability times slope, term by term.  It is output . gradient too, but the output is rounded, and
  // a gradient that is the sum of a row's slopes, which nearly cancel, has nothing to hide that behind.  The products
  // are those that the slopes are made of, added in the same order.
  void settle(const Tile& t, bool skipping, bool few_rows) {
    for (int64_t column = 0; column < size.columns; column += TILE) {
      const Tile all = part(t, 0, t.rows, column, std::min(TILE, size.columns - column));
      const Block block = program.block(all);
      if (skipping && block == Block::hidden) continue;
      if (few_rows) {
        few_products(all);
        settle(all, weigh(all, block == Block::hidden ? Block::mixed : block));
        continue;
      }
      pack(all, column, all.columns);
      for (int64_t r = 0; r < t.rows; r += STEP) {
        const Tile some = part(all, r, std::min(STEP, t.rows - r), column, all.columns);
        const Block kind = program.block(some);
        if (kind == Block::hidden && skipping) continue;
        products(some);
        settle(some, weigh(some, kind == Block::hidden ? Block::mixed : kind));
      }
    }
  }

  void settle(const Tile& t, float scale) {
    const Flushing flushing;
    const V s(scale);
    for (int64_t r = 0; r < t.rows; ++r) {
      const V shift(maximum[t.row + r]), share(inverse[t.row + r]);
      V sum(0.0f);
      for (int64_t k = r * TILE; k < r * TILE + t.wide(); k += W) {
        V p = exponential(V::loadu(scores + k) * s - shift) * share;
        if constexpr (P::has_factor) p = p * V::loadu(factor + k);
        sum = at::vec::fmadd(p, V::loadu(slope + k), sum);
      }
      delta[t.row + r] += total(sum);
    }
  }

  float dot(const TO* a, const TO* b) const {
    const int64_t s = call.out.column, z = call.grad.column;
    float out = 0.0f;
    int64_t e = 0;
    if constexpr (std::is_same_v<TO, float>) {
      V sum(0.0f);
      if (s == 1 && z == 1) {
        for (; e + W <= size.width; e += W) sum = at::vec::fmadd(V::loadu(a + e), V::loadu(b + e), sum);
      }
      out = total(sum);
    }
    for (; e < size.width; ++e) out += to_float(a[e * s]) * to_float(b[e * z]);
    return out;
  }

  void pack(const Tile& t, int64_t column, int64_t columns) {
    const T* k = call.key.at(t.b, t.h, 0, column);
    const T* v = call.value.at(t.b, t.h, 0, column);
    pack_right_transposed<DOT>(k, call.key.row, call.key.column, columns, size.depth, key, packing);
    pack_right<DOT>(k, call.key.row, call.key.column, columns, size.depth, depth, key_right);
    pack_right_transposed<DOT>(v, call.value.row, call.value.column, columns, size.width, value, packing);
  }

  // The same for few rows, which are all that there are: the gradients of the tile's keys and values are made.
  void few(const Tile& t, bool skipping) {
    const Block kind = program.block(t);
    if (kind == Block::hidden && skipping) {
      std::fill_n(tile_key, t.columns * depth, 0.0f);
      std::fill_n(tile_value, t.columns * width, 0.0f);
      return;
    }
    const FloatRows keys = few_products(t);
    differentiate(t, kind == Block::hidden ? Block::mixed : kind);
    const Flushing flushing;
    multiply<false>(probability, 1, TILE, few_grad, width, tile_value, width, t.columns, width, t.rows, nullptr, true);
    multiply<false>(slope, 1, TILE, few_query, depth, tile_key, depth, t.columns, depth, t.rows, nullptr, true);
    multiply<false>(slope, TILE, 1, keys.data, keys.step, grad_query, depth, t.rows, depth, t.columns, nullptr, false);
  }

  // Scores, and the slopes of the weights, of few rows.  Returns the tile's keys.
  FloatRows few_products(const Tile& t) {
    const auto &k = call.key, &v = call.value;
    const FloatRows keys = float_rows(k.at(t.b, t.h, 0, t.column), k.row, k.column, t.columns, size.depth, key);
    const FloatRows values = float_rows(v.at(t.b, t.h, 0, t.column), v.row, v.column, t.columns, size.width, value);
    multiply_rows(few_query, depth, keys.data, keys.step, scores, t.rows, t.columns, depth);
    multiply_rows(few_grad, width, values.data, values.step, slope, t.rows, t.columns, width);
    return keys;
  }

  // Scores, and the slopes of the weights.
  void products(const Tile& t) {
    const float *q = query + t.row * depth_words, *o = grad + t.row * width_words;
    multiply<DOT>(q, depth_words, 1, key, TILE, scores, TILE, t.rows, t.wide(), words<DOT>(size.depth), nullptr, true);
    multiply<DOT>(o, width_words, 1, value, TILE, slope, TILE, t.rows, t.wide(), words<DOT>(size.width), nullptr, true);
  }

  void step(const Tile& t, Block kind, float* grad_key, float* grad_value) {
    products(t);
    differentiate(t, kind);
    const Flushing flushing;
    const int64_t r = words<DOT>(t.row), rows = words<DOT>(t.rows);
    const Left weights = transposed(probability, t.rows);
    multiply<DOT>(weights.data, weights.row, weights.step, grad_right + r * width, width, grad_value, width, t.columns,
                  width, rows, nullptr, false);
    const Left slopes = transposed(slope, t.rows);
    multiply<DOT>(slopes.data, slopes.row, slopes.step, query_right + r * depth, depth, grad_key, depth, t.columns,
                  depth, rows, nullptr, false);
    const float* by_row = slope;
    if constexpr (DOT) {
      pack_left<DOT>(slope, t.rows, left);
      by_row = left;
    }
    multiply<DOT>(by_row, words<DOT>(TILE), 1, key_right, depth, grad_query + t.row * depth, depth, t.rows, depth,
                  words<DOT>(t.columns), nullptr, false);
  }

  struct Left {
    const float* data;
    int64_t row, step;
  };

  // A tile whose columns are the rows of a left operand.
  Left transposed(const float* tile, int64_t rows) {
    if constexpr (!DOT) return {tile, 1, TILE};
    pack_left_transposed<DOT>(tile, rows, left);
    if constexpr (!HAS_TILES) return {left, 1, TILE};
    transpose(left, TILE, words<DOT>(rows), TILE, turned);
    return {turned, TILE, 1};
  }

  // From scores: logits and the factor.  Returns what the logits have yet to be multiplied by.
  float weigh(const Tile& t, Block kind) {
    const bool programmed = made<P>(kind);
    if (programmed) {
      each_vector(t, [&](int64_t k) {
        const V x = V::loadu(scores + k) * V(call.scale);
        x.store(raw + k);
        x.store(scores + k);
      });
    }
    logits(program, scores, t, 1.0f, kind, scratch);
    if constexpr (P::has_factor) program.factor(factor, t, scratch);
    return programmed ? 1.0f : call.scale;
  }

  // From scores and the slopes of the weights: probabilities, times the factor, and the slopes of the scores.
  void differentiate(const Tile& t, Block kind) {
    soften(t, weigh(t, kind));
    if (!made<P>(kind)) return;
    program.backward(raw, slope, t, kind, scratch, learned);
    const Flushing flushing;
    each_vector(t, [&](int64_t k) { (V::loadu(slope + k) * V(call.scale)).store(slope + k); });
  }

  // The same from logits that are still to be multiplied by `scale`.
  void soften(const Tile& t, float scale) {
    const Flushing flushing;
    const V s(scale);
    const int64_t wide = t.wide();
    for (int64_t r = 0; r < t.rows; ++r) {
      const V shift(maximum[t.row + r]), share(inverse[t.row + r]), less(delta[t.row + r]);
      for (int64_t k = r * TILE; k < r * TILE + wide; k += W) {
        V p = exponential(V::loadu(scores + k) * s - shift) * share; // rounded as in the forward
        V slopes = V::loadu(slope + k);
        if constexpr (P::has_factor) {
          const V f = V::loadu(factor + k);
          slopes = slopes * f;
          (p * f).store(probability + k);
        } else {
          p.store(probability + k);
        }
        (p * (slopes - less) * s).store(slope + k);
      }
    }
  }
};

inline int64_t sharing(int64_t heads, int64_t pieces, int threads) {
  if (heads % threads == 0 || heads >= 8 * threads) return 1;
  const int64_t even = threads / std::gcd<int64_t>(threads, heads), enough = (4 * threads + heads - 1) / heads;
  return std::max<int64_t>(1, std::min({even, enough, pieces}));
}

template <class T, class TO, class P>
void backward(const Backward<T, TO>& call, const P& program) {
  const Sizes& s = call.size;
  const Cut cut(s, ROWS);
  const int64_t heads = s.batch * s.heads, pieces = cut.pieces(), share = sharing(heads, pieces, call.threads);
  const int64_t depth = round_up(s.depth, W), width = round_up(s.width, W);
  const int64_t sums = pieces == 1 ? 0 : s.columns * (depth + width);
  const int64_t learned = program.accumulators();
  std::unique_ptr<float[]> accumulators(learned ? new float[learned * call.threads]() : nullptr);
  std::unique_ptr<float[]> parts(sums ? new float[sums * (share > 1 ? heads * share : call.threads)] : nullptr);
#pragma omp parallel num_threads(call.threads)
  {
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    BackwardThread<T, TO, P> thread(call, program, cut.groups * std::max<int64_t>(cut.span, 1),
                                    learned ? accumulators.get() + learned * me : nullptr);
    const auto write = [&](int64_t head, const float* from, int64_t first, int64_t last) {
      thread.write(head / s.heads, head % s.heads, first, last - first, from + first * depth,
                   from + s.columns * depth + first * width);
    };
    for (int64_t n = me; n < heads * share; n += all) {
      const int64_t head = n / share, turn = n % share;
      float* to = sums ? parts.get() + sums * (share > 1 ? n : me) : nullptr;
      if (to) std::fill_n(to, sums, 0.0f);
      for (int64_t p = 0; p < pieces; ++p) {
        const int64_t at = p % (2 * share); // there and back, since later pieces may see more keys
        if ((at < share ? at : 2 * share - 1 - at) != turn) continue;
        thread.run(cut.piece(s, head / s.heads, head % s.heads, p), to, to ? to + s.columns * depth : nullptr);
      }
      if (to && share == 1) {
        for (int64_t j = 0; j < s.columns; j += TILE) write(head, to, j, std::min(j + TILE, s.columns));
      }
    }
    if (share > 1) {
#pragma omp barrier
      const int64_t strips = (s.columns + TILE - 1) / TILE;
      for (int64_t n = me; n < heads * strips; n += all) {
        const int64_t head = n / strips, first = n % strips * TILE, last = std::min(first + TILE, s.columns);
        float* to = parts.get() + sums * head * share;
        for (int64_t k = 1; k < share; ++k) {
          const float* from = to + sums * k;
          for (int64_t x = first * depth; x < last * depth; ++x) to[x] += from[x];
          const int64_t values = s.columns * depth;
          for (int64_t x = values + first * width; x < values + last * width; ++x) to[x] += from[x];
        }
        write(head, to, first, last);
      }
    }
  }
  if (learned) program.reduce(accumulators.get(), call.threads);
}

} // namespace sdpa_rewrite
