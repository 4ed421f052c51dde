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

  // Name the arrays, of n elements each, that the call reads, that it writes, or that it adds to; null has
  // none. edge: those of the arrays of the edges that have the features' type.
  void read(const void*& array, int64_t n);
  void read(void*& array, int64_t n);
  void write(void*& array, int64_t n, bool also_read = false);
  void read(EdgeOptions& edge, const Shape& shape);

  // Replaces the arrays by copies in float, calls f() and converts what it has written.
  template <class F>
  void run(const F& f) {
    begin();
    f();
    end();
  }

 private:
  struct Array {
    void** place;  // where the array's address is, which becomes that of its copy
    void* given;
    int64_t n;
    bool is_read, is_written;
  };
  void begin();
  void end() const;

  DType type_;
  bool on_;
  const Parallel& parallel_;
  std::vector<Array> arrays_;
  // One for all: the system would map memory of several anew in every call.
  std::unique_ptr<float[]> copies_;
};

}  // namespace dfgnn::cpu
