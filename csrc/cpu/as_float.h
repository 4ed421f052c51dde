// Kernels for float, given arrays of float16 or bfloat16: a call's arrays are converted as wholes, when it
// begins and when it ends. float16, which processors are rarely given, thus needs no kernels of its own,
// which would be a quarter of all. A result rounds as if its kernel had computed in float and stored float16
// itself.
#pragma once

#include <memory>
#include <vector>

#include "core/params.h"
#include "engine.h"

namespace dfgnn::cpu {

class AsFloat {
 public:
  // Makes `type` f32 if it is f16, or `also`. Otherwise the functions below do nothing.
  AsFloat(DType& type, const Parallel& parallel, DType also = DType::f16);

  // Replaces an array of n elements by its copy in float. Null stays.
  void read(const void*& array, int64_t n);
  // Replaces an array of n elements that the call writes, which finish() writes. also_read: the call adds to
  // it.
  void write(void*& array, int64_t n, bool also_read = false);
  // Does so for the arrays of the edges that have the features' type.
  void read(EdgeOptions& edge, const Shape& shape);
  // Converts the results.
  void finish() const;

 private:
  struct Result {
    const float* from;
    void* to;
    int64_t n;
  };
  float* copy(const void* array, int64_t n, bool filled);

  DType type_;
  bool on_;
  const Parallel& parallel_;
  std::vector<std::unique_ptr<float[]>> copies_;
  std::vector<Result> results_;
};

}  // namespace dfgnn::cpu
