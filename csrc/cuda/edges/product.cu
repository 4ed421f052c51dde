// The kernels of sddmm (dot products of the feature rows of an edge's two nodes) and of spmm (weighted sums
// of neighbours' feature rows). csrc/cuda/README.md says how lanes share the work, and explains the names
// that kernels have in common.
#include "../attention/epilogue_launch.cuh"
#include "../attention/gather.cuh"

namespace dfgnn::cuda {
namespace {

// out = sum of weight times the neighbours' rows, or of the rows as they are if not WEIGHTED. B: rows in
// flight. CHUNK: edges per iteration, one or more for each of a head's lanes.
template <class C, bool WEIGHTED, int B>
__global__ void __launch_bounds__(kThreads) spmm_kernel(const ProductParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int CHUNK = B > C::LPH ? B : C::LPH, SLOTS = CHUNK / C::LPH;
  Place<C> me(t, p.shape, p.shape.value_dim, p.csr);
  const Rows<C> source = me.rows(p.feat);
  int index[SLOTS] = {};
  Raw rows[B][C::NV];
  const auto load_item = [] {};
  const auto load_edges = [&] { load_rows<C, B>(source, 0, index, rows); };

  A acc[C::NV][C::VEC];
  const auto begin = [&](int, int) { zero(acc); };
  const auto iterate = [&](const int done, const int left) {
    // ---- Weights of the edges, then the sum of rows.
    Weights<A, SLOTS, false, true> weights;
    repeat<SLOTS>([&](int s) {
      A w = 1;
      if constexpr (WEIGHTED) {
        const int64_t eid = fetch_eid<C, CHUNK>(me, p.csr, done, s);
        w = A(static_cast<const T*>(p.weight)[eid * me.heads + me.head]);
      }
      weights.set(s, w, true);
    });
    whole_or_not<CHUNK>(left, [&](auto whole) {
      add_chunk<C, decltype(whole)::value, false, B, CHUNK, !WEIGHTED>(source, left, index, weights, rows,
                                                                       acc, acc);
    });
  };
  const auto finish = [&](const int row, const int slot) {
    if (me.shared()) me.across(acc, t);
    me.store_row(p.out, p.partial_out, acc, A(1), row, slot);
  };
  main_loop<CHUNK, Ahead::all>(
      me, p.csr, t.items, index, load_item, load_edges, begin, [] {}, iterate, finish);
}

// edge_out = row_feat . feat for each edge and head. Each of the blocks that share a wide head computes the
// whole product, and the first of them writes it.
template <class C, int B>
__global__ void __launch_bounds__(kThreads) sddmm_kernel(const ProductParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int CHUNK = B, PERIOD = CHUNK < C::LPH ? CHUNK : C::LPH, SLOTS = CHUNK / PERIOD;
  Place<C> me(t, p.shape, p.shape.value_dim, p.csr);
  const Rows<C> source = me.rows(p.feat);
  const int own = me.hl % PERIOD;
  for (int n = 0; n < t.items; ++n) {
    // ---- Load the row.
    me.take(n);
    Raw raw_row[C::NV];
    A row[C::NV][C::VEC];
    me.load_row(p.row_feat, raw_row, me.row);
    me.unpack_row(raw_row, row, A(1));
    for (int done = 0; me.any(done); done += CHUNK) {
      // ---- Load the neighbours of an iteration; their products go to the lanes that own the edges.
      int index[SLOTS];
      fetch<C, CHUNK>(me, p.csr, n, done, index);
      Raw rows[B][C::NV];
      load_rows<C, B>(source, 0, index, rows);
      A part[B];
#pragma unroll
      for (int u = 0; u < B; ++u) {
        part[u] = 0;
#pragma unroll
        for (int k = 0; k < C::NV; ++k)
          part[u] = me.inside(k) ? dot<T>(row[k], rows[u][k], part[u]) : part[u];
        if (C::WIDE && t.chunks > 1) {
          const int j = __shfl_sync(kAll, index[u / C::LPH], u % C::LPH, C::LPH);
          part[u] += me.far_dot(t, p.row_feat, me.row, p.feat, j);
        }
      }
      reduce_scatter<CHUNK, C::LPH>(part, me.hl);
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) {
        const int k = done + s * C::LPH + own;
        if (k < me.count && me.head_ok && me.hl < PERIOD && me.chunk == 0)
          static_cast<T*>(
              p.edge_out)[int64_t(edge_id(p.csr, me.first + k * me.stride)) * me.heads + me.head] =
              T(part[s]);
      }
    }
  }
}

}  // namespace

const char* spmm(const ProductParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.csr.num_items == 0) return nullptr;
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_config<T>(p.shape.heads, p.shape.value_dim, [&](auto config) {
      using C = decltype(config);
      const auto kernel = p.weight ? spmm_kernel<C, true, C::B> : spmm_kernel<C, false, C::B>;
      for_each_part(p.csr, [&](const Csr& part) {
        ProductParams q = p;
        q.csr = part;
        const Launch<C> way(p.shape, p.shape.value_dim, part);
        launch(s, way.grid, kThreads, way.shared, kernel, q, way.tiling);
      });
    });
    merge_rows<T>(p.csr, p.shape, p.shape.value_dim, p.partial_out, p.out, 1, s);
    return last_error();
  });
}

const char* sddmm(const ProductParams& p, void* stream) {
  if (p.csr.num_items == 0) return nullptr;
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_config<T>(p.shape.heads, p.shape.value_dim, [&](auto config) {
      using C = decltype(config);
      // One launch for all source partitions: each edge has a result of its own, to which no other adds.
      const Launch<C> way(p.shape, p.shape.value_dim, p.csr);
      launch(static_cast<cudaStream_t>(stream), way.grid, kThreads, way.shared, sddmm_kernel<C, C::B>, p,
             way.tiling);
    });
    return last_error();
  });
}

}  // namespace dfgnn::cuda
