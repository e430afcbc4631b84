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

// A row's statistics: its mean is pivot + shift, which one number in Real could not hold where the
// mean is large, and rstd is 1 / sqrt(variance + eps).
template <class Real>
struct Statistics {
  Real pivot, shift, rstd;

  Real xhat(Real element) const { return ((element - pivot) - shift) * rstd; }
};

// Returns the statistics of a row. element(i, pivot) returns element i less the pivot.
//
// One pass over the row gives mean and variance if the pivot is close to the mean, which that of
// the first elements usually is. If not, the variance has lost digits, and a second pass starts
// from the mean of the first.
template <class Real, class First, class Element>
inline Statistics<Real> statistics_of(int64_t width, Real eps, First first, Element element) {
  const int64_t count = std::min<int64_t>(16, width);
  Real pivot = 0;
  for (int64_t i = 0; i < count; ++i) pivot += first(i) / count;
  double mean, variance;
  const auto measure = [&](auto deviation) {
    const Pair<double> sums = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
      const Real d = deviation(i);
      return {d, d * d};
    });
    mean = sums.first / width;
    variance = sums.second / width - mean * mean;
  };
  measure([=](int64_t i) { return first(i) - pivot; });
  if (!(mean * mean <= variance)) {
    pivot += Real(mean);
    measure([=](int64_t i) { return element(i) - pivot; });
  }
  return {pivot, Real(mean), 1 / std::sqrt(Real(variance) + eps)};
}

// Writes y = layer_norm(x + residual) and stored = x + residual; the statistics are those of
// `stored`. Without a residual, `stored` is x, and not written.
template <class T, class Real>
void forward_row(const T* __restrict x, const T* __restrict residual,
                 const Real* __restrict weight, const Real* __restrict bias, T* __restrict y,
                 T* __restrict stored, int64_t width, Real eps) {
  if (residual == nullptr) {
    const auto element = [=](int64_t i) { return widen(x[i]); };
    const Statistics<Real> row = statistics_of<Real>(width, eps, element, element);
    for (int64_t i = 0; i < width; ++i)
      y[i] = narrow<T>(row.xhat(widen(x[i])) * weight[i] + bias[i]);
  } else {
    const auto add = [=](int64_t i) {
      stored[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
      return widen(stored[i]);
    };
    const auto element = [=](int64_t i) { return widen(stored[i]); };
    const Statistics<Real> row = statistics_of<Real>(width, eps, add, element);
    for (int64_t i = 0; i < width; ++i)
      y[i] = narrow<T>(row.xhat(widen(stored[i])) * weight[i] + bias[i]);
  }
}

// Writes dx and adds this row's terms of dweight and dbias. With dxhat = dy * weight:
// dx = rstd * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)) + dsum.
// The statistics are computed again: the row is read in any case.
template <class T, class Real>
void backward_row(const T* __restrict dy, const T* __restrict dsum, const T* __restrict stored,
                  const Real* __restrict weight, T* __restrict dx, Real* __restrict dweight,
                  Real* __restrict dbias, int64_t width, Real eps) {
  const auto element = [=](int64_t i) { return widen(stored[i]); };
  const Statistics<Real> row = statistics_of<Real>(width, eps, element, element);
  const Pair<double> sums = sum<Real>(width, [=](int64_t i) -> Pair<Real> {
    const Real xhat = row.xhat(widen(stored[i]));
    const Real dxhat = widen(dy[i]) * weight[i];
    dweight[i] += widen(dy[i]) * xhat;
    dbias[i] += widen(dy[i]);
    return {dxhat, dxhat * xhat};
  });
  const Real mean = sums.first / width, along = sums.second / width;
  const auto through_norm = [=](int64_t i) {
    const Real xhat = row.xhat(widen(stored[i]));
    return row.rstd * (widen(dy[i]) * weight[i] - mean - xhat * along);
  };
  if (dsum == nullptr)
    for (int64_t i = 0; i < width; ++i) dx[i] = narrow<T>(through_norm(i));
  else
    for (int64_t i = 0; i < width; ++i) dx[i] = narrow<T>(through_norm(i) + widen(dsum[i]));
}
