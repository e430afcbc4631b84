// The arithmetic of one row. cpu_kernels.cpp includes this file once per instruction set, each time
// in another namespace.
//
// T is the type of the tensors, Real that of the computation: double for float64 and float for all
// others. A row is read from memory once; the passes after the first find it in the cache.

// Number of partial sums: two of the widest vectors. The compiler makes vectors of the loops.
constexpr int64_t LANES = 32;

// Adds up both values of terms(i) over a row, in an order that depends on its width alone. Every
// 1,024 elements the partial sums are added in double precision, so that the rounding error of a
// long row is that of a short one.
template <class Real, class Terms>
inline Pair<double> sum(int64_t width, Terms terms) {
  Pair<double> total = {0, 0};
  for (int64_t begin = 0; begin < width; begin += 1024) {
    const int64_t end = std::min(begin + 1024, width);
    Real first[LANES] = {}, second[LANES] = {};
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
      for (int64_t k = 0; k < LANES; ++k) {
        const Pair<Real> term = terms(i + k);
        first[k] += term.first;
        second[k] += term.second;
      }
    for (int64_t k = 0; i < end; ++i, ++k) {
      const Pair<Real> term = terms(i);
      first[k] += term.first;
      second[k] += term.second;
    }
    for (int64_t half = LANES / 2; half > 0; half /= 2)
      for (int64_t k = 0; k < half; ++k) {
        first[k] += first[k + half];
        second[k] += second[k + half];
      }
    total.first += first[0];
    total.second += second[0];
  }
  return total;
}

// The mean of the first elements. Deviations from it are small if the row's mean is large.
template <class Real, class Element>
inline Real pivot_of(int64_t width, Element element) {
  const int64_t count = std::min<int64_t>(16, width);
  Real total = 0;
  for (int64_t i = 0; i < count; ++i) total += element(i) / count;
  return total;
}

// What turns a row of deviations from the pivot into xhat: (row[i] - mean) * rstd.
template <class Real>
struct Statistics {
  Real mean, rstd;
};

// Returns the statistics of a row of deviations from the pivot, given its sum and sum of squares.
template <class Real>
inline Statistics<Real> statistics_of(Real* __restrict row, Pair<double> sums, int64_t width,
                                      Real eps) {
  const double mean = sums.first / width;
  const double variance = sums.second / width - mean * mean;
  if (mean * mean <= variance)
    return {Real(mean), 1 / std::sqrt(Real(variance) + eps)};
  // The pivot is far from the mean, and the difference has lost digits. Centred once, a row still
  // has the rounding error of its mean; centred twice, it does not.
  const Real far = mean;
  const Real rest = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
                      row[i] -= far;
                      return {row[i], 0};
                    }).first / width;
  const Real squares = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
                         row[i] -= rest;
                         return {row[i] * row[i], 0};
                       }).first / width;
  return {0, 1 / std::sqrt(squares + eps)};
}

// Writes y = layer_norm(x + residual) and stored = x + residual; the mean and the variance are
// those of `stored`. Without a residual, `stored` is x, and not written. `row` is scratch memory.
template <class T, class Real>
void forward_row(const T* __restrict x, const T* __restrict residual,
                 const Real* __restrict weight, const Real* __restrict bias, T* __restrict y,
                 T* __restrict stored, Real* __restrict row, int64_t width, Real eps) {
  Pair<double> sums;
  if (residual == nullptr) {
    const Real pivot = pivot_of<Real>(width, [=](int64_t i) { return widen(x[i]); });
    sums = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
      row[i] = widen(x[i]) - pivot;
      return {row[i], row[i] * row[i]};
    });
  } else {
    const Real pivot =
        pivot_of<Real>(width, [=](int64_t i) { return widen(x[i]) + widen(residual[i]); });
    sums = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
      stored[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
      row[i] = widen(stored[i]) - pivot;
      return {row[i], row[i] * row[i]};
    });
  }
  const auto [mean, rstd] = statistics_of(row, sums, width, eps);
  for (int64_t i = 0; i < width; ++i)
    y[i] = narrow<T>((row[i] - mean) * rstd * weight[i] + bias[i]);
}

// Writes dx and adds this row's terms of dweight and dbias. With dxhat = dy * weight:
// dx = rstd * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)) + dsum.
// The statistics are computed again, from a row that is read anyway, because mean and rstd in
// float32 would not determine xhat where the mean is large.
template <class T, class Real>
void backward_row(const T* __restrict dy, const T* __restrict dsum, const T* __restrict stored,
                  const Real* __restrict weight, T* __restrict dx, Real* __restrict dweight,
                  Real* __restrict dbias, Real* __restrict row, int64_t width, Real eps) {
  const Real pivot = pivot_of<Real>(width, [=](int64_t i) { return widen(stored[i]); });
  const Pair<double> sums = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
    row[i] = widen(stored[i]) - pivot;
    return {row[i], row[i] * row[i]};
  });
  const Statistics<Real> statistics = statistics_of(row, sums, width, eps);
  const Real mean = statistics.mean, rstd = statistics.rstd;
  const Pair<double> projections = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
    const Real xhat = (row[i] - mean) * rstd;
    const Real dxhat = widen(dy[i]) * weight[i];
    row[i] = xhat;
    dweight[i] += widen(dy[i]) * xhat;
    dbias[i] += widen(dy[i]);
    return {dxhat, dxhat * xhat};
  });
  const Real mean_dxhat = projections.first / width, along = projections.second / width;
  if (dsum == nullptr)
    for (int64_t i = 0; i < width; ++i)
      dx[i] = narrow<T>(rstd * (widen(dy[i]) * weight[i] - mean_dxhat - row[i] * along));
  else
    for (int64_t i = 0; i < width; ++i)
      dx[i] = narrow<T>(rstd * (widen(dy[i]) * weight[i] - mean_dxhat - row[i] * along) +
                        widen(dsum[i]));
}
