// The operators that make structure and plans of graphs on the CPU.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "../cpu/structure.h"
#include "cpu_graph.h"
#include "parallel.h"

namespace dfgnn {
namespace {

constexpr int64_t kLimit = int64_t(1) << 31;

int32_t* ints(Tensor& t) { return static_cast<int32_t*>(t.mutable_data_ptr()); }
int64_t* longs(Tensor& t) { return static_cast<int64_t*>(t.mutable_data_ptr()); }

cpu::Ids ids(const Tensor& t) { return {data(t), t.stride(0), t.scalar_type() == ScalarType::Long}; }

// Checks that indptr is contiguous int64 with one entry or more, and returns its data.
const int64_t* offsets(const Checker& check, const Tensor& indptr) {
  check.tensor("indptr", indptr, {-1}, {ScalarType::Long});
  check.require(indptr.size(0) > 0 && indptr.is_contiguous(), "indptr: expected a contiguous one, not empty");
  return static_cast<const int64_t*>(data(indptr));
}

// Checks the indices of a CSR and returns their data.
const int32_t* columns(const Checker& check, const Tensor& indices) {
  check.tensor("indices", indices, {-1}, {ScalarType::Int});
  check.require(indices.is_contiguous() && indices.size(0) < kLimit,
                "indices: expected contiguous ones, fewer than 2**31");
  return static_cast<const int32_t*>(data(indices));
}

// Graphs of at most this number of edges and nodes get their plans already when coo_to_csr sorts their edges,
// because for them the overhead of calls and tensors dominates.
constexpr int64_t kPlannedAtOnce = int64_t(1) << 16;

// Where an array lies in the tensor that coo_to_csr returns, in units of int32. A length of -1 means that the
// array is missing.
struct Place {
  int64_t begin = 0, length = -1;
};
// Where the arrays of one direction lie, and how many partial-result slots its plan has.
struct Places {
  Place indptr, indices, eids, items, splits;
  int64_t num_slots = 0;
};
// The beginning of the tensor that coo_to_csr returns, which Python reads in dfgnn/sparse/packed.py: the
// least and the largest source and destination; whether the rows of the sorted CSR are sources; and where the
// arrays lie.
struct Header {
  int64_t src_low, src_high, dst_low, dst_high, by_src;
  Places sides[2];  // [0]: rows are destinations; [1]: rows are sources
};

// Finds places for arrays behind the header, one after the other, 16-byte aligned.
class Layout {
 public:
  Place add(int64_t length) {
    const Place place{total_, length};
    total_ += (length + 3) / 4 * 4;
    return place;
  }
  int64_t total() const { return total_; }

 private:
  int64_t total_ = (sizeof(Header) / sizeof(int32_t) + 3) / 4 * 4;
};

// Checks and returns the sources and the destinations: two tensors, or rows 0 and 1 of `src` if dst is
// missing.
std::pair<cpu::Ids, cpu::Ids> ends_of(const Checker& check, const Tensor& src, const OptTensor& dst) {
  if (dst) {
    check.tensor("src", src, {-1}, {ScalarType::Int, ScalarType::Long});
    check.tensor("dst", *dst, {src.size(0)}, {ScalarType::Int, ScalarType::Long});
    return {ids(src), ids(*dst)};
  }
  check.tensor("edge_index", src, {2, -1}, {ScalarType::Int, ScalarType::Long});
  const bool is_int64 = src.scalar_type() == ScalarType::Long;
  const auto* first = static_cast<const char*>(data(src));
  const char* second = first + src.stride(0) * (is_int64 ? sizeof(int64_t) : sizeof(int32_t));
  return {{first, src.stride(1), is_int64}, {second, src.stride(1), is_int64}};
}

// The tensor that coo_to_csr returns, while its arrays are made. First lay_out() and lay_out_plan() give the
// arrays their places, then the caller sets `base` to the tensor's memory, and at() returns their addresses.
// side: the direction, 0 if rows are destinations and 1 if they are sources.
struct Packed {
  int32_t* at(const Place& place) const { return place.length < 0 ? nullptr : base + place.begin; }
  int64_t* indptr(int side) const { return reinterpret_cast<int64_t*>(at(header.sides[side].indptr)); }

  void lay_out(Layout& layout, int side, bool with_indices, bool with_eids) {
    Places& to = header.sides[side];
    to.indptr = layout.add(2 * (rows[side] + 1));
    if (with_indices) to.indices = layout.add(num_edges);
    if (with_eids) to.eids = layout.add(num_edges);
  }
  void lay_out_plan(Layout& layout, int side, int64_t max_edges) {  // room for the most that a plan can need
    header.sides[side].items = layout.add(4 * (rows[side] + num_edges / max_edges));
    header.sides[side].splits = layout.add(4 * (num_edges / max_edges));
  }
  // Makes the work items and splits of a direction, whose CSR must have been made.
  void plan(int side, int64_t max_edges) {
    Places& of = header.sides[side];
    const cpu::RowPlan plan = cpu::count_items(indptr(side), rows[side], num_edges, max_edges);
    of.items.length = 4 * plan.num_items, of.splits.length = 4 * plan.num_splits;
    of.num_slots = plan.num_slots;
    cpu::make_items(indptr(side), rows[side], max_edges, plan, reinterpret_cast<Item*>(at(of.items)),
                    reinterpret_cast<Split*>(at(of.splits)), parallel());
  }
  // Returns a direction and its plan. indices: the array to use if the tensor has none.
  Csr csr(int side, const int32_t* indices) const {
    const Places& of = header.sides[side];
    Csr c{};
    c.indices = of.indices.length < 0 ? indices : at(of.indices);
    c.eids = at(of.eids);
    c.items = reinterpret_cast<const Item*>(at(of.items));
    c.splits = reinterpret_cast<const Split*>(at(of.splits));
    c.num_items = of.items.length / 4, c.num_splits = of.splits.length / 4, c.num_slots = of.num_slots;
    c.num_rows = rows[side];
    return c;
  }

  Header header;
  int64_t rows[2], num_edges;
  int32_t* base;
};

// Makes the CSR of edges src -> dst, whose ids are int32 or int64. With max_edges > 0 it also makes, for a
// graph of few edges, what plan_graph makes: the plan, and for `backward` the other direction and its plan.
// The CSR's rows are destinations, or sources if the given sources are sorted and the destinations are not.
// dst is missing if src is an edge_index. A negative num_src or num_dst stands for the largest id + 1; if
// both are negative, for the larger of the two. with_loops: edges from a node to itself are dropped, and i ->
// i for all i < min(num_src, num_dst) is appended.
//
// Returns the number under which the library stores the planned graph, or 0; the number of edges, or -1 if a
// node id is out of range, for which the caller raises the error; and one tensor with the Header and the
// arrays of a planned graph, of which indptr is int64. Then come edge_map (int64, only with_loops), which is
// the position in src and dst of each edge, or -1 for an appended one; and indptr, indices and eids of a
// graph that is not planned. Missing are the eids of rows that were sorted already, indices that are the
// given int32 ids, and what was not made.
std::tuple<int64_t, int64_t, Tensor, OptTensor, OptTensor, OptTensor, OptTensor> coo_to_csr(
    Tensor src, OptTensor dst, int64_t num_src, int64_t num_dst, bool with_loops, int64_t max_edges,
    bool backward) {
  const Checker check("dfgnn::coo_to_csr", src);
  const auto [sources, targets] = ends_of(check, src, dst);
  const int64_t num_given = src.size(src.dim() - 1);
  check.require(num_given < kLimit, "src: expected fewer than 2**31 edges");
  check.require(max_edges >= 0 && max_edges < kLimit, "max_edges: expected a bound below 2**31");

  const cpu::Coo coo = cpu::read_coo(sources, targets, num_given, with_loops);
  const auto size = [](int64_t largest) { return std::min(largest, kLimit) + 1; };  // ids may be any number
  if (num_src < 0 && num_dst < 0)
    num_src = num_dst = size(std::max(coo.src_high, coo.dst_high));
  else if (num_src < 0)
    num_src = size(coo.src_high);
  else if (num_dst < 0)
    num_dst = size(coo.dst_high);
  const bool by_src = coo.src_sorted && !coo.dst_sorted, sorted = by_src || coo.dst_sorted;
  Packed made{{coo.src_low, coo.src_high, coo.dst_low, coo.dst_high, by_src, {}}, {num_dst, num_src}, 0, {}};
  Layout layout;
  const bool in_range = coo.src_low >= 0 && coo.dst_low >= 0 && coo.src_high < num_src &&
                        coo.dst_high < num_dst && num_src < kLimit && num_dst < kLimit;
  if (!in_range) {
    Tensor packed = make(src, {layout.total()}, ScalarType::Int);
    std::memcpy(packed.mutable_data_ptr(), &made.header, sizeof made.header);
    return {0, -1, packed, {}, {}, {}, {}};
  }
  const int64_t num_loops = with_loops ? std::min(num_src, num_dst) : 0;
  const int64_t num_edges = made.num_edges = coo.num_kept + num_loops;
  check.require(num_edges < kLimit, "src: expected fewer than 2**31 edges, loops included");

  const int first = by_src, other = 1 - first;
  const Tensor& cols = by_src && dst ? *dst : src;
  // shared: the given ids serve as the CSR's indices.
  const bool shared =
      dst && sorted && !with_loops && cols.scalar_type() == ScalarType::Int && cols.is_contiguous();
  const bool planned = max_edges > 0 && std::max({num_edges, num_src, num_dst}) <= kPlannedAtOnce;
  const int num_planned = !planned ? 0 : backward ? 2 : 1;
  if (planned) made.lay_out(layout, first, !shared, !sorted);
  if (other < num_planned) made.lay_out(layout, other, true, true);
  for (int k = 0; k < num_planned; ++k) made.lay_out_plan(layout, k, max_edges);
  Tensor packed = make(src, {layout.total()}, ScalarType::Int);
  made.base = ints(packed);

  OptTensor edge_map, indptr, own_indices, eids;
  cpu::CooSort sort{};
  sort.rows = by_src ? sources : targets, sort.cols = by_src ? targets : sources;
  sort.num_kept = coo.num_kept, sort.num_loops = num_loops, sort.num_rows = made.rows[first];
  sort.sorted = sorted;
  if (with_loops) {
    edge_map = make(src, {num_edges}, ScalarType::Long);
    int64_t* map = longs(*edge_map);
    cpu::find_kept(sources, targets, num_given, map);
    std::fill(map + coo.num_kept, map + num_edges, -1);
    if (coo.num_kept < num_given) sort.edge_map = map;
  }
  if (planned) {
    const Places& at = made.header.sides[first];
    sort.indptr = made.indptr(first), sort.indices = made.at(at.indices), sort.eids = made.at(at.eids);
  } else {
    indptr = make(src, {made.rows[first] + 1}, ScalarType::Long), sort.indptr = longs(*indptr);
    if (!shared) own_indices = make(src, {num_edges}, ScalarType::Int), sort.indices = ints(*own_indices);
    if (!sorted) eids = make(src, {num_edges}, ScalarType::Int), sort.eids = ints(*eids);
  }
  cpu::sort_coo(sort, parallel());
  const int32_t* indices = shared ? static_cast<const int32_t*>(data(cols)) : sort.indices;
  if (other < num_planned) {
    const Places& to = made.header.sides[other];
    const char* error = cpu::transpose({sort.indptr, indices, sort.eids, made.rows[first], made.rows[other],
                                        num_edges, made.indptr(other), made.at(to.indices), made.at(to.eids)},
                                       parallel());
    check.require(!error, error);
  }
  for (int k = 0; k < num_planned; ++k) made.plan(k, max_edges);
  std::memcpy(made.base, &made.header, sizeof made.header);
  if (!planned) return {0, num_edges, packed, edge_map, indptr, own_indices, eids};
  CpuGraph graph{num_src, num_edges, made.csr(0, indices), {}, backward, {packed}};
  if (backward) graph.reverse = made.csr(1, indices);
  if (shared) graph.held.push_back(cols);
  return {keep_on_cpu(graph), num_edges, packed, edge_map, {}, {}, {}};
}

// One direction of a graph and its plan, while plan_graph makes them.
struct Direction {
  OptTensor indptr, indices, eids, items, splits;
  int64_t num_slots = 0;
};

// Returns the other direction of a CSR: its rows are the num_cols columns of `of`. Its edge ids are empty
// unless need_eids.
Direction transposed(const Checker& check, const Direction& of, int64_t num_cols, bool need_eids) {
  cpu::Transposition p{};
  p.indptr = offsets(check, *of.indptr), p.indices = columns(check, *of.indices);
  p.num_rows = of.indptr->size(0) - 1, p.num_cols = num_cols, p.num_edges = of.indices->size(0);
  check.require(num_cols >= 0 && num_cols < kLimit, "num_cols: expected a number in [0, 2**31)");
  check.tensor("eids", of.eids, {p.num_edges}, {ScalarType::Int});
  check.require(!of.eids || of.eids->is_contiguous(), "eids: expected contiguous ones");
  p.eids = static_cast<const int32_t*>(data(of.eids));
  Direction made;
  made.indptr = make(*of.indptr, {num_cols + 1}, ScalarType::Long);
  made.indices = make(*of.indptr, {p.num_edges}, ScalarType::Int);
  made.eids = make(*of.indptr, {need_eids ? p.num_edges : 0}, ScalarType::Int);
  p.new_indptr = longs(*made.indptr), p.new_indices = ints(*made.indices);
  p.new_eids = need_eids ? ints(*made.eids) : nullptr;
  const char* error = cpu::transpose(p, parallel());
  check.require(!error, error);
  return made;
}

std::tuple<Tensor, Tensor, Tensor> transpose_csr(Tensor indptr, Tensor indices, OptTensor eids,
                                                 int64_t num_cols, bool need_eids) {
  const Checker check("dfgnn::transpose_csr", indptr);
  const Direction made = transposed(check, {indptr, indices, eids, {}, {}}, num_cols, need_eids);
  return {*made.indptr, *made.indices, *made.eids};
}

// Makes work items and splits of a direction, in row order and without unused ones, and returns how many
// there are.
cpu::RowPlan plan(const Checker& check, Direction& of, int64_t max_edges) {
  const Tensor& indptr = *of.indptr;
  const int64_t* begin = offsets(check, indptr);
  columns(check, *of.indices);
  check.require(max_edges > 0 && max_edges < kLimit, "max_edges: expected a bound below 2**31");
  const int64_t num_rows = indptr.size(0) - 1;
  check.require(num_rows < kLimit, "indptr: expected fewer than 2**31 rows");
  const cpu::RowPlan plan = cpu::count_items(begin, num_rows, of.indices->size(0), max_edges);
  check.require(plan.num_items >= 0, "indptr: expected values that rise from 0 to the number of edges");
  of.items = make(indptr, {plan.num_items, 4}, ScalarType::Int);
  of.splits = make(indptr, {plan.num_splits, 4}, ScalarType::Int);
  of.num_slots = plan.num_slots;
  cpu::make_items(begin, num_rows, max_edges, plan, static_cast<Item*>(of.items->mutable_data_ptr()),
                  static_cast<Split*>(of.splits->mutable_data_ptr()), parallel());
  return plan;
}

// Returns work items, splits, and counts (PlanParams::counts): work items beyond one per row, slots, splits.
// The unnamed parameter is num_cols, which is needed for source partitions only.
std::tuple<Tensor, Tensor, Tensor> plan_rows(Tensor indptr, Tensor indices, int64_t, int64_t parts,
                                             int64_t max_edges, bool by_length) {
  const Checker check("dfgnn::plan_rows", indptr);
  check.require(parts == 1 && !by_length, "parts, by_length: expected the order of the rows on the CPU");
  Direction of{indptr, indices, {}, {}, {}};
  const cpu::RowPlan made = plan(check, of, max_edges);
  Tensor counts = make(indptr, {3}, ScalarType::Int);
  const int64_t found[] = {made.num_items - (indptr.size(0) - 1), made.num_slots, made.num_splits};
  std::copy(std::begin(found), std::end(found), ints(counts));
  return {*of.items, *of.splits, counts};
}

// Returns a planned direction as kernels get it.
Csr csr_of(const Direction& of) {
  Csr c{};
  c.indices = static_cast<const int32_t*>(data(*of.indices));
  c.eids = static_cast<const int32_t*>(data(of.eids));
  c.items = static_cast<const Item*>(data(*of.items));
  c.splits = static_cast<const Split*>(data(*of.splits));
  c.num_items = of.items->size(0), c.num_splits = of.splits->size(0), c.num_slots = of.num_slots;
  c.num_rows = of.indptr->size(0) - 1;
  return c;
}

// Does in one call what transpose_csr, plan_rows and graph_handle (graphs.h) would do: makes the direction
// that is not given with its edge ids, makes the plans, and stores the graph. If a given direction has no
// edge ids, its edges are in the user's order. Without `backward`, nothing is made for the reverse direction.
//
// Returns the number under which the library stores the graph, the numbers of slots of both directions, the
// direction that was made (indptr, indices, eids), and work items and splits of both directions.
std::tuple<int64_t, int64_t, int64_t, OptTensor, OptTensor, OptTensor, Tensor, Tensor, OptTensor, OptTensor>
plan_graph(OptTensor indptr, OptTensor indices, OptTensor eids, OptTensor rev_indptr, OptTensor rev_indices,
           OptTensor rev_eids, int64_t num_dst, int64_t num_src, int64_t max_edges, bool backward) {
  const char* const op = "dfgnn::plan_graph";
  STD_TORCH_CHECK(bool(indptr) == bool(indices) && bool(rev_indptr) == bool(rev_indices) &&
                      (indptr || rev_indptr) && (indptr || !eids) && (rev_indptr || !rev_eids),
                  op, ": indptr, indices: expected both of a direction, and a direction");
  const Checker check(op, indptr ? *indptr : *rev_indptr);
  Direction both[2] = {{indptr, indices, eids, {}, {}}, {rev_indptr, rev_indices, rev_eids, {}, {}}}, made;
  const int64_t rows[2] = {num_dst, num_src};
  for (int k = 0; k < 2; ++k) {
    if (!both[k].indptr) continue;
    check.tensor(k ? "rev_indptr" : "indptr", both[k].indptr, {rows[k] + 1}, {ScalarType::Long});
    check.tensor(k ? "rev_eids" : "eids", both[k].eids, {both[k].indices->size(0)}, {ScalarType::Int});
    check.require(!both[k].eids || both[k].eids->is_contiguous(), "eids: expected contiguous ones");
  }
  check.require(!(indptr && rev_indptr) || indices->size(0) == rev_indices->size(0),
                "rev_indices: expected as many as indices");
  for (int k = 0; k < (backward ? 2 : 1); ++k) {
    if (!both[k].indptr) made = both[k] = transposed(check, both[1 - k], rows[k], true);
    plan(check, both[k], max_edges);
  }
  CpuGraph graph{num_src, both[0].indices->size(0), csr_of(both[0]), {}, backward, {}};
  if (backward) graph.reverse = csr_of(both[1]);
  for (int k = 0; k < (backward ? 2 : 1); ++k)
    for (const OptTensor* t : {&both[k].indices, &both[k].eids, &both[k].items, &both[k].splits})
      if (*t) graph.held.push_back(**t);
  return {keep_on_cpu(graph), both[0].num_slots, both[1].num_slots, made.indptr,   made.indices,
          made.eids,          *both[0].items,    *both[0].splits,   both[1].items, both[1].splits};
}

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CPU, m) {
  m.impl("coo_to_csr", TORCH_BOX(&dfgnn::coo_to_csr));
  m.impl("transpose_csr", TORCH_BOX(&dfgnn::transpose_csr));
  m.impl("plan_rows", TORCH_BOX(&dfgnn::plan_rows));
  m.impl("plan_graph", TORCH_BOX(&dfgnn::plan_graph));
}
