// Attention, forward: the scores of a tile of keys at a time, with the running maximum and sum of each row
// (Milakov and Gimelshein, 2018; Dao et al., 2022).

namespace sdpa_rewrite {

enum class Block { hidden, mixed, bare };

// What a call works on.  Strides are in elements: batch, head (of keys), group, row, column.
template <class T>
struct Operand {
  T* data;
  int64_t batch, head, group, row, column;
  T* at(int64_t b, int64_t h, int64_t g, int64_t i) const { return data + b * batch + h * head + g * group + i * row; }
};

struct Sizes {
  int64_t batch, heads, group, rows, columns, depth, width;
};

// Some rows of one head of keys, and a tile of columns.  Rows run over `span` positions of one query head after
// another.
struct Tile {
  int64_t b, h, g0, i0, span, row, rows, column, columns;
  int64_t g(int64_t r) const { return g0 + (row + r) / span; }
  int64_t i(int64_t r) const { return i0 + (row + r) % span; }
  int64_t wide() const { return round_up(columns, W); } // what is computed of a row; memory beyond holds anything
};

// f(k) for each vector of the computed part of a tile, k where it lies.
template <class F>
inline void each_vector(const Tile& t, const F& f) {
  const int64_t wide = t.wide();
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t k = r * TILE; k < r * TILE + wide; k += W) f(k);
  }
}

// A program, P below, is a struct that is written for each call (source.py).  It has
//   has_score, has_bare, has_factor   whether there is a score program, one without masks, a factor of probabilities
//   floor                             a row whose largest logit is not above this may see what is hidden
//   block(tile)                       whether a tile is hidden, masked somehow, or not masked (`bare`)
//   score, bare(tile, t, scratch)     logits in place of scaled scores
//   factor(out, t, scratch)           what the probabilities of a tile are multiplied by
//   backward(raw, slope, t, kind, scratch, learned)   slopes of scaled scores in place of those of logits
//   accumulators(), reduce(all, threads)              the sums that each thread makes for learned captures
//   scratch()                         the floats of memory that these need

// How the rows under one head of keys are cut: pieces of one query head, or several whole query heads.
struct Cut {
  int64_t groups, span, across, along;
  Cut(const Sizes& s, int64_t most) {
    span = std::min(s.rows, most);
    groups = s.rows > most ? 1 : std::max<int64_t>(1, std::min(s.group, most / std::max<int64_t>(1, s.rows)));
    along = s.rows ? (s.rows + span - 1) / span : 0;
    across = (s.group + groups - 1) / groups;
    if (along) span = round_up((s.rows + along - 1) / along, MR);
    if (along) along = (s.rows + span - 1) / span;
    span = std::min(span, s.rows);
  }
  int64_t pieces() const { return across * along; }
  Tile piece(const Sizes& s, int64_t b, int64_t h, int64_t n) const {
    Tile t{};
    t.b = b, t.h = h;
    t.g0 = n / along * groups;
    t.i0 = n % along * span;
    t.span = std::min(span, s.rows - t.i0);
    t.rows = std::min(groups, s.group - t.g0) * t.span;
    return t;
  }
};

inline Tile part(const Tile& t, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  Tile out = t;
  out.row = row, out.rows = rows, out.column = column, out.columns = columns;
  return out;
}

// Whether a program makes logits of a tile's scores; else they are the scores, times the scale.
template <class P>
inline bool made(Block kind) { return kind == Block::mixed ? P::has_score : P::has_bare; }

// Logits of a tile from its scores; not yet times `scale` where no program makes them.
template <class P>
inline void logits(const P& program, float* tile, const Tile& t, float scale, Block kind, float* scratch) {
  if (scale != 1.0f && made<P>(kind)) {
    each_vector(t, [&](int64_t k) { (V::loadu(tile + k) * V(scale)).store(tile + k); });
  }
  if constexpr (P::has_score) {
    if (kind == Block::mixed) program.score(tile, t, scratch);
  }
  if constexpr (P::has_bare) {
    if (kind == Block::bare) program.bare(tile, t, scratch);
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = t.columns; c < t.wide(); ++c) tile[r * TILE + c] = -INFINITE;
  }
}

struct Rows { // running statistics of rows
  float* maximum;  // [rows]
  float* sum;      // [rows, W]: parts of it
  float* alpha;    // [rows]: by what the last tile made earlier ones smaller
};

// Probabilities of a tile N vectors wide, not yet divided by the rows' sums, in place of its logits (times `scale`).
template <int N>
inline void soften(float* tile, const Rows& rows, int64_t n, float scale) {
  const V s(scale);
  for (int64_t r = 0; r < n; ++r) {
    float* row = tile + r * TILE;
    V x[N];
    for (int k = 0; k < N; ++k) x[k] = V::loadu(row + k * W) * s;
    V top = x[0];
    for (int k = 1; k < N; ++k) top = larger(top, x[k]);
    const float before = rows.maximum[r], now = std::max(before, largest(top));
    const V shift(now == -INFINITE ? 0.0f : now);
    V sum(0.0f);
    for (int k = 0; k < N; ++k) {
      x[k] = exponential(x[k] - shift);
      x[k].store(row + k * W);
      sum = sum + x[k];
    }
    const float alpha = before == now ? 1.0f : std::exp(before - now);
    rows.alpha[r] = alpha;
    rows.maximum[r] = now;
    at::vec::fmadd(V::loadu(rows.sum + r * W), V(alpha), sum).store(rows.sum + r * W);
  }
}

// f(a constant) for the width of a tile in vectors.
template <int N, class F>
inline void with_width(int64_t vectors, const F& f) {
  if constexpr (N > 1) {
    if (vectors < N) return with_width<N - 1>(vectors, f);
  }
  f(std::integral_constant<int, N>{});
}

template <class T, class TO>
struct Forward {
  Sizes size;
  Operand<const T> query, key, value;
  Operand<TO> out;
  float* maximum; // [batch, heads, group, rows]
  float* sum;
  float scale;
  bool safe;
  int threads;
};

constexpr int64_t STEP = 48; // rows that go through a tile of keys together
constexpr int64_t FEW = 2;   // up to so many rows, keys and values are read as they lie

template <class T, class TO, class P>
class ForwardThread {
  static constexpr bool DOT = HAS_DOT && std::is_same_v<T, c10::BFloat16>;
  const Forward<T, TO>& call;
  const P& program;
  const Sizes& size;
  int64_t floats, depth, width; // of a query: padded floats, and words; of an output row: padded floats
  const bool lies;              // keys and values of few rows are read as they lie, of whatever type
  Workspace space;
  TilesOfThread tiles;

 public:
  float *query, *key, *value, *tile, *left, *factor, *out, *scratch, *packing;
  Rows rows;

  ForwardThread(const Forward<T, TO>& c, const P& p, int64_t most)
      : call(c), program(p), size(c.size), floats(round_up(c.size.depth, W)),
        depth(DOT ? words<DOT>(c.size.depth) : floats), width(round_up(c.size.width, W)),
        lies(!std::is_same_v<T, float> && c.key.column == 1 && c.value.column == 1 && c.size.depth % LOT<T> == 0 &&
             c.size.width % LOT<T> == 0),
        space(most * (depth + width + W + 2) + FEW * floats + TILE * (floats + depth + width + 3 * STEP) + p.scratch() +
              256) {
    query = space.take(std::max(most * depth, FEW * floats));
    out = space.take(most * width);
    rows = {space.take(most), space.take(most * W), space.take(most)};
    key = space.take(TILE * floats);
    packing = space.take(TILE * depth);
    value = space.take(TILE * width);
    tile = space.take(STEP * TILE);
    left = space.take(STEP * TILE);
    factor = space.take(STEP * TILE);
    scratch = space.take(p.scratch());
  }

  // The rows of `t` over the tiles of keys [first, last): unnormalised in `out`, statistics in `rows`.
  void run(const Tile& t, int64_t first, int64_t last, bool skipping) {
    for (int64_t r = 0; r < t.rows; ++r) {
      const T* from = call.query.at(t.b, t.h, t.g(r), t.i(r));
      if (!DOT || t.rows <= FEW) {
        pack_row<false>(from, call.query.column, size.depth, query + r * floats);
        std::fill(query + r * floats + size.depth, query + (r + 1) * floats, 0.0f);
      } else {
        pack_row<DOT>(from, call.query.column, size.depth, query + r * depth);
      }
    }
    std::fill_n(out, t.rows * width, 0.0f);
    std::fill_n(rows.sum, t.rows * W, 0.0f);
    std::fill_n(rows.maximum, t.rows, -INFINITE);
    bool skipped = false;
    for (int64_t n = first; n < last; ++n) {
      const int64_t column = n * TILE, columns = std::min(TILE, size.columns - column);
      if (skipping && program.block(part(t, 0, t.rows, column, columns)) == Block::hidden) {
        skipped = true;
        continue;
      }
      const Keys keys = pack(t, column, columns);
      for (int64_t r = 0; r < t.rows; r += STEP) {
        const Tile some = part(t, r, std::min(STEP, t.rows - r), column, columns);
        Block kind = program.block(some);
        if (kind == Block::hidden && skipping) {
          skipped = true;
          continue;
        }
        step(some, kind == Block::hidden ? Block::mixed : kind, keys);
      }
    }
    if (skipped && P::floor > -INFINITE) {
      // a row in which nothing is visible sees what was skipped
      for (int64_t r = 0; r < t.rows; ++r) if (rows.maximum[r] <= P::floor) return run(t, first, last, false);
    }
  }

  // The keys of a tile, transposed, and the values; where there are few rows, both as floats that lie as they are, or
  // nothing where they need not be floats.
  struct Keys {
    bool few;
    FloatRows key, value;
  };

  Keys pack(const Tile& t, int64_t column, int64_t columns) {
    const auto& k = call.key;
    const auto& v = call.value;
    if (t.rows <= FEW && lies) return {true, {}, {}};
    const T *first = k.at(t.b, t.h, 0, column), *first_value = v.at(t.b, t.h, 0, column);
    if (t.rows <= FEW) {
      return {true, float_rows(first, k.row, k.column, columns, size.depth, key),
              float_rows(first_value, v.row, v.column, columns, size.width, value)};
    }
    pack_right_transposed<DOT>(first, k.row, k.column, columns, size.depth, key, packing);
    pack_right<DOT>(first_value, v.row, v.column, columns, size.width, width, value);
    return {false, {key, TILE}, {value, width}};
  }

  void step(const Tile& t, Block kind, const Keys& keys) {
    if (keys.few && lies) {
      multiply_rows(query + t.row * floats, floats, call.key.at(t.b, t.h, 0, t.column), call.key.row, tile, t.rows,
                    t.columns, floats);
    } else if (keys.few) {
      multiply_rows(query + t.row * floats, floats, keys.key.data, keys.key.step, tile, t.rows, t.columns, floats);
    } else {
      multiply<DOT>(query + t.row * depth, depth, 1, key, TILE, tile, TILE, t.rows, t.wide(), words<DOT>(size.depth),
                    nullptr, true);
    }
    logits(program, tile, t, call.scale, kind, scratch);
    const Rows here{rows.maximum + t.row, rows.sum + t.row * W, rows.alpha + t.row};
    const float scale = made<P>(kind) ? 1.0f : call.scale;
    {
      const Flushing flushing;
      with_width<TILE / W>(t.wide() / W, [&](auto n) { soften<decltype(n)::value>(tile, here, t.rows, scale); });
    }
    if constexpr (P::has_factor) {
      program.factor(factor, t, scratch);
      each_vector(t, [&](int64_t k) { (V::loadu(tile + k) * V::loadu(factor + k)).store(tile + k); });
    }
    const Flushing flushing;
    float* to = out + t.row * width;
    if (keys.few && lies) return add_values(t, to, here.alpha);
    const auto [of_value, next] = keys.value;
    if (!DOT || keys.few) {
      return multiply<false>(tile, TILE, 1, of_value, next, to, width, t.rows, width, t.columns, here.alpha, false);
    }
    pack_left<DOT>(tile, t.rows, left);
    multiply<DOT>(left, words<DOT>(TILE), 1, of_value, next, to, width, t.rows, width, words<DOT>(t.columns),
                  here.alpha, false);
  }

  // The values of a tile, as they lie, by the weights of one row or two.
  void add_values(const Tile& t, float* to, const float* alpha) {
    if constexpr (!std::is_same_v<T, float>) {
      const T* from = call.value.at(t.b, t.h, 0, t.column);
      const auto add = [&](auto m, auto n, int64_t first, int64_t last) {
        multiply_lying<decltype(m)::value, decltype(n)::value>(tile, from + first, call.value.row, to + first, width,
                                                               last - first, t.columns, alpha);
      };
      const auto rows = [&](auto m) {
        const int64_t wide = width / (4 * W) * (4 * W);
        add(m, std::integral_constant<int, 4>{}, 0, wide);
        add(m, std::integral_constant<int, 2>{}, wide, width);
      };
      static_assert(FEW == 2);
      t.rows == 1 ? rows(std::integral_constant<int, 1>{}) : rows(std::integral_constant<int, 2>{});
    }
  }

  void write(const Tile& t) {
    for (int64_t r = 0; r < t.rows; ++r) {
      const float all = total(V::loadu(rows.sum + r * W));
      const int64_t at = ((t.b * size.heads + t.h) * size.group + t.g(r)) * size.rows + t.i(r);
      call.maximum[at] = rows.maximum[r];
      call.sum[at] = all;
      const bool empty = call.safe && rows.maximum[r] == -INFINITE;
      finish(out + r * width, t, r, empty ? 0.0f : 1.0f / all, empty);
    }
  }

  void finish(const float* row, const Tile& t, int64_t r, float factor, bool empty) {
    TO* to = call.out.at(t.b, t.h, t.g(r), t.i(r));
    if (empty) for (int64_t e = 0; e < size.width; ++e) to[e * call.out.column] = TO(0.0f);
    else if (call.out.column == 1) scaled(row, to, size.width, factor);
    else for (int64_t e = 0; e < size.width; ++e) to[e * call.out.column] = TO(row[e] * factor);
  }
};

// Several threads share a row's keys: each leaves its part here, [part][rows][width + 2].
struct Parts {
  int64_t count, rows, width;
  std::unique_ptr<float[]> data;
  float* at(int64_t piece, int64_t part) { return data.get() + (piece * count + part) * rows * (width + 2); }
};

inline int64_t rows_at_once(const Sizes& s, int threads) {
  int64_t most = 384;
  const auto pieces = [&](int64_t n) { return s.batch * s.heads * Cut(s, n).pieces(); };
  while (most > STEP && pieces(most) < 4 * threads) most /= 2;
  return most;
}

template <class T, class TO, class P>
void forward(const Forward<T, TO>& call, const P& program) {
  const Sizes& s = call.size;
  const int64_t most = rows_at_once(s, call.threads), tiles = (s.columns + TILE - 1) / TILE;
  const Cut cut(s, most);
  const int64_t pieces = s.batch * s.heads * cut.pieces();
  if (pieces == 0) return;
  Parts parts{1, cut.groups * cut.span, round_up(s.width, W), nullptr};
  if (pieces < call.threads && P::floor == -INFINITE) {
    parts.count = std::max<int64_t>(1, std::min(tiles / 2, (2 * call.threads + pieces - 1) / pieces));
    if (parts.count > 1) parts.data.reset(new float[pieces * parts.count * parts.rows * (parts.width + 2)]);
  }
  const auto piece = [&](int64_t n) {
    const int64_t head = n / cut.pieces();
    return cut.piece(s, head / s.heads, head % s.heads, cut.pieces() - 1 - n % cut.pieces()); // the long ones first
  };
  std::atomic<int64_t> next{0}, merge{0};
#pragma omp parallel num_threads(call.threads)
  {
    ForwardThread<T, TO, P> thread(call, program, parts.rows);
    for (int64_t n; (n = next++) < pieces * parts.count;) {
      const Tile t = piece(n / parts.count);
      const int64_t p = n % parts.count;
      thread.run(t, tiles * p / parts.count, tiles * (p + 1) / parts.count, true);
      if (parts.count == 1) thread.write(t);
      else keep(thread, parts, n / parts.count, p, t.rows);
    }
    if (parts.count > 1) {
#pragma omp barrier
      for (int64_t n; (n = merge++) < pieces;) {
        combine(thread, parts, n, piece(n).rows);
        thread.write(piece(n));
      }
    }
  }
}

template <class Thread>
void keep(Thread& thread, Parts& parts, int64_t piece, int64_t part, int64_t rows) {
  float* at = parts.at(piece, part);
  std::copy_n(thread.out, rows * parts.width, at);
  std::copy_n(thread.rows.maximum, rows, at + parts.rows * parts.width);
  for (int64_t r = 0; r < rows; ++r) at[parts.rows * (parts.width + 1) + r] = total(V::loadu(thread.rows.sum + r * W));
}

template <class Thread>
void combine(Thread& thread, Parts& parts, int64_t piece, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float top = -INFINITE, all = 0;
    const auto maximum = [&](int64_t p) { return parts.at(piece, p)[parts.rows * parts.width + r]; };
    for (int64_t p = 0; p < parts.count; ++p) top = std::max(top, maximum(p));
    float* out = thread.out + r * parts.width;
    std::fill_n(out, parts.width, 0.0f);
    for (int64_t p = 0; p < parts.count; ++p) {
      const float factor = maximum(p) == top ? 1.0f : std::exp(maximum(p) - top);
      const float* from = parts.at(piece, p) + r * parts.width;
      for (int64_t e = 0; e < parts.width; ++e) out[e] += from[e] * factor;
      all += parts.at(piece, p)[parts.rows * (parts.width + 1) + r] * factor;
    }
    thread.rows.maximum[r] = top;
    std::fill_n(thread.rows.sum + r * W, W, 0.0f);
    thread.rows.sum[r * W] = all;
  }
}

} // namespace sdpa_rewrite
