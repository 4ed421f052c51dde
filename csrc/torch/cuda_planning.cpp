// The operators that make structure and plans of graphs on the GPU.
#include <algorithm>
#include <tuple>

#include "../cuda/engine.h"
#include "../cuda/graph/structure.h"
#include "cuda.h"

namespace dfgnn {
namespace {

// Checks an array of offsets, such as indptr, and returns its data.
const int64_t* offsets(const Checker& check, const char* name, const Tensor& t) {
  check.tensor(name, t, {-1}, {ScalarType::Long});
  check.require(t.size(0) > 0 && t.is_contiguous(), name, ": expected a contiguous one, not empty");
  check.count(name, t.size(0) - 1);
  return static_cast<const int64_t*>(data(t));
}
// Checks the indices of a CSR and returns their data.
const int32_t* columns(const Checker& check, const Tensor& t, const Tensor& indptr) {
  check.tensor("indices", t, {-1}, {ScalarType::Int});
  check.require(t.is_contiguous(), "indices: expected contiguous ones");
  check.count("indices", t.size(0));
  check.require(t.size(0) == 0 || indptr.size(0) > 1, "indices: edges without rows");
  return static_cast<const int32_t*>(data(t));
}
// Checks that `offsets` has an entry for each window of kTileRows rows, and one more.
void check_windows(const Checker& check, const Tensor& offsets, int64_t num_rows) {
  const int64_t windows = (num_rows + kTileRows - 1) / kTileRows;
  check.require(offsets.size(0) - 1 == windows, "offsets: expected those of ", windows, " windows, got ",
                offsets.size(0) - 1);
}
int64_t* numbers(Tensor& t) { return static_cast<int64_t*>(t.mutable_data_ptr()); }

cuda::Ids ids(const Tensor& t) { return {data(t), t.stride(0), t.scalar_type() == ScalarType::Long}; }

// Makes both CSRs of edges src -> dst: (indptr, indices, eids, edge_map, rev_indptr, rev_indices, rev_eids).
// found [kStructureNumbers] is set to what cuda/graph/structure.h describes as StructureParams::numbers, and
// done is StructureParams::done. Edges with a node out of range are left out: the caller sees from the ranges
// of ids in `found` whether there are any. With loops, indices, eids and edge_map are as long as if no edge
// was dropped; `found` says how many edges were kept.
using Sorted = std::tuple<Tensor, Tensor, Tensor, OptTensor, Tensor, Tensor, Tensor>;
Sorted sort_edges(const Checker& check, const Tensor& src, const Tensor& dst, int64_t num_src,
                  int64_t num_dst, bool with_loops, int64_t* found, int64_t* done) {
  check.tensor("src", src, {-1}, {ScalarType::Int, ScalarType::Long});
  const int64_t num_given = src.size(0);
  check.tensor("dst", dst, {num_given}, {ScalarType::Int, ScalarType::Long});
  check.count("num_src", num_src);
  check.count("num_dst", num_dst);
  cuda::StructureParams p{};
  p.src = ids(src), p.dst = ids(dst);
  p.num_given = num_given, p.num_src = num_src, p.num_dst = num_dst;
  p.with_loops = with_loops, p.num_loops = with_loops ? std::min(num_src, num_dst) : 0;
  const int64_t room = p.room = num_given + p.num_loops;
  check.count("src: number of edges, loops included", room);

  const ScalarType i32 = ScalarType::Int, i64 = ScalarType::Long;
  p.numbers = found, p.done = done;
  const int64_t rows[] = {num_dst, num_src};
  std::vector<Tensor> made;
  for (int side = 0; side < 2; ++side) {
    Tensor indptr = make(src, {rows[side] + 1}, i64), indices = make(src, {room}, i32),
           eids = make(src, {room}, i32);
    p.indptr[side] = numbers(indptr);
    p.indices[side] = static_cast<int32_t*>(indices.mutable_data_ptr());
    p.eids[side] = static_cast<int32_t*>(eids.mutable_data_ptr());
    made.insert(made.end(), {indptr, indices, eids});
  }
  OptTensor edge_map;
  if (with_loops) edge_map = make(src, {room}, i64), p.edge_map = numbers(*edge_map);

  launched(cuda::sorting_bytes(p, p.sorting_bytes));
  Workspace scratch;
  for (int k = 0; k < 2; ++k) {
    scratch.add(p.keys[k], true, {2 * room}, i64);
    scratch.add(p.places[k], true, {2 * room}, i32);
  }
  scratch.add(p.ends, true, {2 * room}, i32);
  scratch.add(p.parts, true, {cuda::kMostEdgeBlocks, cuda::kEdgeNumbers}, i64);
  scratch.add(p.degrees, true, {2, cuda::kDegreeScratch}, i64);
  scratch.add(p.sorting, true, {int64_t(p.sorting_bytes)}, ScalarType::Byte);
  const OptTensor memory = scratch.make(src);
  launched(cuda::structure(p, stream_of(src)));
  return {made[0], made[1], made[2], edge_map, made[3], made[4], made[5]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, OptTensor, Tensor, Tensor, Tensor> structure(
    Tensor src, Tensor dst, int64_t num_src, int64_t num_dst, bool with_loops) {
  const CudaScope scope(src);
  const Checker check("dfgnn::structure", src);
  Tensor found = make(src, {cuda::kStructureNumbers}, ScalarType::Long);
  return std::tuple_cat(std::tuple(found),
                        sort_edges(check, src, dst, num_src, num_dst, with_loops, numbers(found), nullptr));
}

// Does what `structure` does, but waits for the device, and returns the numbers as a list on the host.
std::tuple<Sizes, Tensor, Tensor, Tensor, OptTensor, Tensor, Tensor, Tensor> structure_read(
    Tensor src, Tensor dst, int64_t num_src, int64_t num_dst, bool with_loops) {
  const CudaScope scope(src);
  const Checker check("dfgnn::structure_read", src);
  cuda::HostNumbers found;
  launched(found.error());
  Sorted made = sort_edges(check, src, dst, num_src, num_dst, with_loops, found.numbers(), found.done());
  launched(found.wait(stream_of(src)));
  return std::tuple_cat(std::tuple(Sizes(found.numbers(), found.done())), std::move(made));
}

// Allocates work items and splits, and sets the members of `p` that have to do with their sizes. more: how
// many work items there are at most, beyond one per entry of indptr (a row, or a window of tiles).
Cut room_for(const Checker& check, const Tensor& indptr, PlanParams& p, int64_t max_edges, int64_t more,
             int64_t num_splits) {
  check.require(max_edges > 0 && max_edges < kMostIds, "items: expected a bound in [1, 2**31), got ",
                max_edges);
  check.count("items: their number", indptr.size(0) - 1 + more);
  p.num_rows = indptr.size(0) - 1, p.max_edges = int32_t(max_edges);
  p.num_items = p.num_rows + more, p.front = more, p.num_splits = num_splits;
  Cut made{make(indptr, {p.num_items, 4}, ScalarType::Int), make(indptr, {num_splits, 4}, ScalarType::Int)};
  p.items = static_cast<Item*>(made.items.mutable_data_ptr());
  p.splits = static_cast<Split*>(made.splits.mutable_data_ptr());
  return made;
}

// Makes a plan without waiting for counts: its arrays have room for the most work items (more) and splits
// (num_splits) that can be necessary. Returns work items, splits and PlanParams::counts. p: the parameters
// that room_for() does not set.
std::tuple<Tensor, Tensor, Tensor> plan(const Checker& check, const Tensor& indptr, PlanParams p,
                                        int64_t max_edges, int64_t more, int64_t num_splits) {
  const Cut made = room_for(check, indptr, p, max_edges, more, num_splits);
  Tensor counts = make(indptr, {cuda::plan_counts(p)}, ScalarType::Int);
  p.counts = static_cast<int32_t*>(counts.mutable_data_ptr());
  launched(cuda::plan_rows(p, stream_of(indptr)));
  return {made.items, made.splits, counts};
}

std::tuple<Tensor, Tensor, Tensor> plan_rows(Tensor indptr, Tensor indices, int64_t num_cols, int64_t parts,
                                             int64_t max_edges, bool by_length) {
  const CudaScope scope(indptr);
  const Checker check("dfgnn::plan_rows", indptr);
  check.require(parts > 0 && parts < 1000 && max_edges > 0,
                "parts, max_edges: expected counts, of parts below ", "1000, got ", parts, " and ",
                max_edges);
  check.count("num_cols", num_cols);
  PlanParams p{};
  p.indptr = offsets(check, "indptr", indptr), p.indices = columns(check, indices, indptr);
  p.num_cols = num_cols, p.parts = int32_t(parts), p.by_length = by_length;
  p.stride = 1, p.last_row = indptr.size(0) - 1;
  // cuts: the most work items that cuts between partitions add, up to parts - 1 per row. As each of these
  // work items has an edge, they are no more than the edges.
  const int64_t edges = indices.size(0), more = edges / max_edges;
  const int64_t cuts = std::min((parts - 1) * p.last_row, edges);
  return plan(check, indptr, p, max_edges, more + cuts, parts > 1 ? std::min(p.last_row, edges) : more);
}

std::tuple<Tensor, Tensor, Tensor> plan_windows(Tensor chunks, int64_t num_chunks, int64_t num_rows,
                                                int64_t max_chunks) {
  const CudaScope scope(chunks);
  const Checker check("dfgnn::plan_windows", chunks);
  PlanParams p{};
  p.indptr = offsets(check, "offsets", chunks);
  check.count("num_chunks", num_chunks);
  check.count("num_rows", num_rows);
  check.require(max_chunks > 0, "max_chunks: expected a count, got ", max_chunks);
  check_windows(check, chunks, num_rows);
  p.parts = 1, p.stride = kTileRows, p.last_row = num_rows;
  const int64_t more = num_chunks / max_chunks;
  return plan(check, chunks, p, max_chunks, more, more * kTileRows);
}

Tensor degrees(Tensor indptr) {
  const CudaScope scope(indptr);
  const Checker check("dfgnn::degrees", indptr);
  const int64_t* begin = offsets(check, "indptr", indptr);
  Tensor scratch = make(indptr, {cuda::kDegreeScratch}, ScalarType::Long);
  Tensor found = make(indptr, {cuda::kDegreeNumbers}, ScalarType::Long);
  const cuda::Degrees p{begin, indptr.size(0) - 1, numbers(scratch), numbers(found)};
  launched(cuda::degrees(&p, 1, false, stream_of(indptr)));
  return found;
}

Tensor falls(Tensor indptr, Tensor indices) {
  const CudaScope scope(indptr);
  const Checker check("dfgnn::falls", indptr);
  const int64_t* begin = offsets(check, "indptr", indptr);
  const int32_t* column = columns(check, indices, indptr);
  Tensor count = make(indptr, {1}, ScalarType::Long);
  launched(
      cuda::falls(begin, column, indptr.size(0) - 1, indices.size(0), numbers(count), stream_of(indptr)));
  return count;
}

Tensor sharing(Tensor indptr, Tensor indices, int64_t step, int64_t most) {
  const CudaScope scope(indptr);
  const Checker check("dfgnn::sharing", indptr);
  const int64_t* begin = offsets(check, "indptr", indptr);
  const int32_t* column = columns(check, indices, indptr);
  check.require(step > 0 && step < kMostIds && most > 0 && most < (int64_t(1) << 25),
                "step, most: expected counts, of edges below 2**25, got ", step, " and ", most);
  Tensor sums = make(indptr, {2}, ScalarType::Long);
  launched(
      cuda::sharing(begin, column, indptr.size(0) - 1, step, int(most), numbers(sums), stream_of(indptr)));
  return sums;
}

Tensor tile_counts(Tensor indptr, Tensor indices) {
  const CudaScope scope(indptr);
  const Checker check("dfgnn::tile_counts", indptr);
  const int64_t* begin = offsets(check, "indptr", indptr);
  const int32_t* column = columns(check, indices, indptr);
  const int64_t rows = indptr.size(0) - 1;
  Tensor chunks = make(indptr, {(rows + kTileRows - 1) / kTileRows + 1}, ScalarType::Long);
  launched(cuda::tile_counts(begin, column, rows, numbers(chunks), stream_of(indptr)));
  return chunks;
}

std::tuple<Tensor, Tensor> tiles(Tensor indptr, Tensor indices, Tensor first, int64_t num_chunks) {
  const CudaScope scope(indptr);
  const Checker check("dfgnn::tiles", indptr);
  const int64_t* begin = offsets(check, "indptr", indptr);
  const int32_t* column = columns(check, indices, indptr);
  const int64_t* chunk = offsets(check, "offsets", first);
  const int64_t rows = indptr.size(0) - 1;
  check_windows(check, first, rows);
  check.require(num_chunks >= 0 && num_chunks <= indices.size(0),
                "num_chunks: expected at most one per edge, got ", num_chunks);
  Tensor chunks = make(indptr, {num_chunks, kTileInts}, ScalarType::Int);
  Tensor twice = make(indptr, {1}, ScalarType::Int);
  launched(cuda::tiles(begin, column, rows, chunk, num_chunks,
                       static_cast<int32_t*>(chunks.mutable_data_ptr()),
                       static_cast<int32_t*>(twice.mutable_data_ptr()), stream_of(indptr)));
  return {chunks, twice};
}

}  // namespace

std::vector<Cut> cut_rows(const Checker& check, const std::vector<Cuttable>& directions) {
  std::vector<PlanParams> plans;
  std::vector<Cut> made;
  Workspace scratch;
  void* counts[2] = {};
  for (const Cuttable& given : directions) {
    PlanParams p{};
    p.indptr = offsets(check, "indptr", given.indptr),
    p.indices = columns(check, given.indices, given.indptr);
    p.parts = 1, p.by_length = given.by_length, p.stride = 1, p.exact = true;
    p.num_rows = p.last_row = given.indptr.size(0) - 1;
    check.require(given.more >= 0 && given.more <= given.indices.size(0) && given.num_splits >= 0 &&
                      given.num_splits <= given.more,
                  "more, num_splits: expected no more than edges, got ", given.more, " and ",
                  given.num_splits);
    made.push_back(room_for(check, given.indptr, p, given.max_edges, given.more, given.num_splits));
    scratch.add(counts[plans.size()], true, {cuda::plan_counts(p)}, ScalarType::Int);
    plans.push_back(p);
  }
  const Tensor& like = directions[0].indptr;
  const OptTensor memory = scratch.make(like);
  for (size_t k = 0; k < plans.size(); ++k) plans[k].counts = static_cast<int32_t*>(counts[k]);
  launched(cuda::plan_directions(plans.data(), int(plans.size()), stream_of(like)));
  return made;
}

namespace {

std::tuple<Tensor, Tensor> cut_rows_of_one(Tensor indptr, Tensor indices, int64_t max_edges, bool by_length,
                                           int64_t more, int64_t num_splits) {
  const CudaScope scope(indptr);
  const Checker check("dfgnn::cut_rows", indptr);
  const Cut made = cut_rows(check, {{indptr, indices, max_edges, by_length, more, num_splits}})[0];
  return {made.items, made.splits};
}

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CUDA, m) {
  m.impl("structure", TORCH_BOX(&dfgnn::structure));
  m.impl("structure_read", TORCH_BOX(&dfgnn::structure_read));
  m.impl("cut_rows", TORCH_BOX(&dfgnn::cut_rows_of_one));
  m.impl("plan_rows", TORCH_BOX(&dfgnn::plan_rows));
  m.impl("plan_windows", TORCH_BOX(&dfgnn::plan_windows));
  m.impl("degrees", TORCH_BOX(&dfgnn::degrees));
  m.impl("falls", TORCH_BOX(&dfgnn::falls));
  m.impl("sharing", TORCH_BOX(&dfgnn::sharing));
  m.impl("tile_counts", TORCH_BOX(&dfgnn::tile_counts));
  m.impl("tiles", TORCH_BOX(&dfgnn::tiles));
}
