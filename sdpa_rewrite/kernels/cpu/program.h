// What programs read of a tile, and which tiles they hide.

namespace sdpa_rewrite {

constexpr int64_t CELL = 16; // rows that share an entry of the table of hidden tiles

// dst[0:n] from src, whose elements are `stride` apart, as another type.
template <class S, class D>
inline void copy(const S* src, int64_t stride, D* dst, int64_t n) {
  if (stride == 1) {
    if constexpr (std::is_same_v<S, D>) std::memcpy(dst, src, n * sizeof(D));
    else if constexpr (std::is_same_v<D, float> && (std::is_same_v<S, c10::BFloat16> || std::is_same_v<S, c10::Half>)) {
      convert(src, dst, n);
    } else for (int64_t k = 0; k < n; ++k) dst[k] = static_cast<D>(src[k]);
  } else {
    for (int64_t k = 0; k < n; ++k) dst[k] = static_cast<D>(src[k * stride]);
  }
}

// Rows [lo, hi] and query heads [first, last] of a tile.
struct Span {
  int64_t first, last, lo, hi;
  explicit Span(const Tile& t) : first(t.g(0)), last(t.g(t.rows - 1)) {
    lo = first == last ? t.i(0) : t.i0;
    hi = first == last ? t.i(t.rows - 1) : t.i0 + t.span - 1;
  }
};

// Nothing is visible but where low <= column - row <= high.
inline Block within_band(const Span& s, const Tile& t, bool has_low, int64_t low, bool has_high, int64_t high) {
  const int64_t first = t.column, last = t.column + t.columns - 1;
  if ((has_high && first - s.hi > high) || (has_low && last - s.lo < low)) return Block::hidden;
  const bool all = (!has_high || last - s.lo <= high) && (!has_low || first - s.hi >= low);
  return all ? Block::bare : Block::mixed;
}

inline Block both(Block a, Block b) {
  if (a == Block::hidden || b == Block::hidden) return Block::hidden;
  return a == Block::bare && b == Block::bare ? Block::bare : Block::mixed;
}

// What a program says of tiles whose masks are tensors, looked up once: 1 some visible, 2 some masked.
struct Table {
  int64_t batch = 1, heads = 1, group = 1, cells = 1, tiles = 0;
  bool tall = false; // the rows of a cell differ
  std::unique_ptr<uint8_t[]> data;

  uint8_t* at(int64_t b, int64_t h, int64_t g, int64_t cell) const {
    b = batch == 1 ? 0 : b, h = heads == 1 ? 0 : h, g = group == 1 ? 0 : g;
    return data.get() + (((b * heads + h) * group + g) * cells + (cells == 1 ? 0 : cell)) * tiles;
  }

  Block of(const Span& s, const Tile& t) const {
    bool visible = false, masked = false, hidden = true;
    const int64_t tile = t.column / TILE, last = group == 1 ? s.first : s.last;
    for (int64_t g = s.first; g <= last; ++g) {
      for (int64_t cell = s.lo / CELL; cell <= s.hi / CELL; ++cell) {
        const uint8_t found = at(t.b, t.h, g, cell)[tile];
        visible |= (found & 1) != 0;
        masked |= (found & 2) != 0;
        if (cells == 1) break;
      }
    }
    hidden = !visible;
    return hidden ? Block::hidden : masked ? Block::mixed : Block::bare;
  }

  // `visible` writes for each position of a tile 0: hidden, 1: masked somehow, 2: not masked.
  template <class Program>
  void fill(const Sizes& s, int threads, const Program& program) {
    tiles = (s.columns + TILE - 1) / TILE;
    const int64_t all = batch * heads * group * cells;
    data.reset(new uint8_t[all * tiles]);
#pragma omp parallel num_threads(threads) if (all * tiles > 64)
    {
      alignas(64) float out[CELL * TILE];
      std::unique_ptr<float[]> scratch(new float[program.scratch() + 16]);
#pragma omp for
      for (int64_t n = 0; n < all; ++n) {
        Tile t{};
        t.b = n / (heads * group * cells), t.h = n / (group * cells) % heads, t.g0 = n / cells % group;
        t.i0 = n % cells * CELL;
        t.rows = tall ? std::min(CELL, s.rows - t.i0) : 1;
        t.span = t.rows;
        for (int64_t tile = 0; tile < tiles; ++tile) {
          t.column = tile * TILE, t.columns = std::min(TILE, s.columns - t.column);
          program.visible(out, t, scratch.get());
          data[n * tiles + tile] = summary(out, t);
        }
      }
    }
  }

  static uint8_t summary(const float* out, const Tile& t) {
    V most(0.0f), least(-2.0f); // the smallest, with the other sign
    float last_most = 0.0f, last_least = -2.0f;
    for (int64_t r = 0; r < t.rows; ++r) {
      const float* row = out + r * TILE;
      int64_t c = 0;
      for (; c + W <= t.columns; c += W) {
        const V x = V::loadu(row + c);
        most = larger(most, x);
        least = larger(least, V(0.0f) - x);
      }
      for (; c < t.columns; ++c) {
        last_most = std::max(last_most, row[c]);
        last_least = std::max(last_least, -row[c]);
      }
    }
    const bool visible = std::max(largest(most), last_most) > 0.0f;
    const bool masked = std::max(largest(least), last_least) > -2.0f;
    return (visible ? 1 : 0) | (masked ? 2 : 0);
  }
};

// Add a tile of slopes to the gradient of what was read at row(r) + column(c).
template <class Row, class Column>
inline void collect(const float* tile, const Tile& t, float* to, bool wide, int64_t stride, const Row& row,
                    const Column& column) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const float* from = tile + r * TILE;
    float* at = to + row(t.g(r), t.i(r));
    if (!wide) {
      float sum = 0.0f;
      for (int64_t c = 0; c < t.columns; ++c) sum += from[c];
      *at += sum;
    } else if (stride == 1) {
      at += column(t.column);
      for (int64_t c = 0; c < t.columns; ++c) at[c] += from[c];
    } else {
      for (int64_t c = 0; c < t.columns; ++c) at[column(t.column + c)] += from[c];
    }
  }
}

} // namespace sdpa_rewrite
