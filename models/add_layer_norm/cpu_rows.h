// The arithmetic of one row. cpu_kernels.cpp includes this file once per instruction set, each time
// in another namespace.
//
// T is the type of the tensors, and Real the compute type: double for float64, float for all other
// types. A row is read from memory once; later passes over the row read it from the cache.

// Number of partial sums: four SIMD vectors of 16 floats. The compiler vectorises the loops.
constexpr int64_t LANES = 64;
// Number of elements after which the partial sums are added in double precision. A partial sum thus
// has at most eight terms: in a longer one, an outlier would absorb too many small terms.
constexpr int64_t BLOCK = 8 * LANES;

// Returns the sums of both values of terms(i) over a row, in an order that `width` alone decides.
template <class Real, class Terms>
inline Pair<double> sum(int64_t width, Terms terms) {
  Pair<double> total = {0, 0};
  for (int64_t begin = 0; begin < width; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, width);
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

// Statistics of a row. The mean is pivot + shift, because a single Real is too imprecise for a
// large mean; rstd is 1 / sqrt(variance + eps). If rows are not CENTRED, the mean is taken to be 0.
template <class Real>
struct Statistics {
  Real pivot, shift, rstd;

  Real xhat(Real element) const { return ((element - pivot) - shift) * rstd; }
};

// Returns the statistics of a row. The first pass gets elements from load(i), a second pass from
// reload(i).
//
// The pivot is the mean of the first 16 elements, usually close to the mean of the row: one pass
// then gives mean and variance. Otherwise, the variance has lost digits or its sum has overflowed,
// and a second pass uses the mean from the first pass as pivot.
template <class Real, bool CENTRED, class Load, class Reload>
inline Statistics<Real> statistics_of(int64_t width, Real eps, Load load, Reload reload) {
  if constexpr (!CENTRED) {
    const Pair<double> sums = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
      const Real element = load(i);
      return {0, element * element};
    });
    return {0, 0, 1 / std::sqrt(Real(sums.second / width) + eps)};
  }
  const int64_t count = std::min<int64_t>(16, width);
  Real pivot = 0;
  for (int64_t i = 0; i < count; ++i) pivot += load(i) / count;
  double mean, variance;
  const auto measure = [&](auto deviation) {
    const Pair<double> sums = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
      const Real d = deviation(i);
      return {d, d * d};
    });
    mean = sums.first / width;
    variance = sums.second / width - mean * mean;
  };
  measure([=](int64_t i) { return load(i) - pivot; });
  if (!(mean * mean <= variance && std::isfinite(variance))) {
    pivot += Real(mean);
    measure([=](int64_t i) { return reload(i) - pivot; });
  }
  return {pivot, Real(mean), 1 / std::sqrt(Real(variance) + eps)};
}

// Writes y = norm(x + residual) and stored = x + residual. The norm is computed from the rounded
// sum in `stored`. Without a residual, the norm is that of x, and `stored` is not written.
template <class T, class Real, bool CENTRED>
void forward_row(const T* __restrict x, const T* __restrict residual,
                 const Real* __restrict weight, const Real* __restrict bias, T* __restrict y,
                 T* __restrict stored, int64_t width, Real eps) {
  if (residual == nullptr) {
    const auto element = [=](int64_t i) { return widen(x[i]); };
    const Statistics<Real> row = statistics_of<Real, CENTRED>(width, eps, element, element);
    for (int64_t i = 0; i < width; ++i)
      y[i] = narrow<T>(row.xhat(widen(x[i])) * weight[i] + bias[i]);
  } else {
    const auto add_and_store = [=](int64_t i) {
      stored[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
      return widen(stored[i]);
    };
    const auto element = [=](int64_t i) { return widen(stored[i]); };
    const Statistics<Real> row = statistics_of<Real, CENTRED>(width, eps, add_and_store, element);
    for (int64_t i = 0; i < width; ++i)
      y[i] = narrow<T>(row.xhat(widen(stored[i])) * weight[i] + bias[i]);
  }
}

// Writes dx, and adds this row's terms to dweight and dbias. With dxhat = dy * weight:
// dx = rstd * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)) + dsum, without mean(dxhat) if rows
// are not CENTRED.
// The statistics are recomputed, not stored by the forward pass: the row is read in any case.
template <class T, class Real, bool CENTRED>
void backward_row(const T* __restrict dy, const T* __restrict dsum, const T* __restrict stored,
                  const Real* __restrict weight, T* __restrict dx, Real* __restrict dweight,
                  Real* __restrict dbias, int64_t width, Real eps) {
  const auto element = [=](int64_t i) { return widen(stored[i]); };
  const Statistics<Real> row = statistics_of<Real, CENTRED>(width, eps, element, element);
  const Pair<double> sums = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
    const Real xhat = row.xhat(widen(stored[i]));
    const Real dxhat = widen(dy[i]) * weight[i];
    dweight[i] += widen(dy[i]) * xhat;
    dbias[i] += widen(dy[i]);
    return {dxhat, dxhat * xhat};
  });
  const Real mean = CENTRED ? sums.first / width : 0, along = sums.second / width;
  const auto through_norm = [=](int64_t i) {
    const Real xhat = row.xhat(widen(stored[i]));
    return row.rstd * (widen(dy[i]) * weight[i] - mean - xhat * along);
  };
  if (dsum == nullptr)
    for (int64_t i = 0; i < width; ++i) dx[i] = narrow<T>(through_norm(i));
  else
    for (int64_t i = 0; i < width; ++i) dx[i] = narrow<T>(through_norm(i) + widen(dsum[i]));
}
