// A product by a prepared launch.
#pragma once

#include <ATen/ops/empty.h>

#include "table.h"

namespace cutegemm {

// The launch of these operands, all of them on the device of that number.
inline Found look_up(const Operands& of, double beta, const Options& options, Known& found) {
  return table_of<Product>().find(key_of(of, beta, options), found);
}

// A handle of CUDA's that means another stream in every thread (cudaStreamPerThread).
inline void* const PER_THREAD = reinterpret_cast<void*>(2);

using Addresses = c10::ArrayRef<const void*>;

// Where a launch goes: the current stream and, while this lives, a workspace of it.
struct Destination {
  void* stream = nullptr;
  std::optional<Workspaces::Kept> kept;

  // False when Python must enqueue: the operands lie on another device than the current one, the stream has no workspace
  // that is large enough, or it is captured and the launch needs one.
  bool find(const Launch& launch, int device) {
    const auto* guard = c10::impl::getDeviceGuardImpl(served.type);
    if (guard->getDevice().index() != device || served.current_stream(device, &stream) != 0) return false;
    if (launch.words == 0 && launch.parts == 0) return true;
    int capturing = 1;
    if (stream == PER_THREAD || served.is_capturing(stream, &capturing) != 0 || capturing != 0) return false;
    kept = workspaces().find(device, stream);
    return kept && kept->words >= launch.words && kept->parts >= launch.parts;
  }
};

// Whether all of these can be enqueued from here.
inline bool have_destinations(std::initializer_list<const Launch*> launches, int device) {
  return std::all_of(launches.begin(), launches.end(),
                     [device](const Launch* each) { return Destination().find(*each, device); });
}

// Enqueues a launch on the current stream. False when Python must do it: it has no destination, or the launcher failed
// and Python is to say why.
inline bool enqueue(const Launch& launch, int device, Addresses addresses, c10::ArrayRef<Value> numbers) {
  Destination to;
  if (!to.find(launch, device)) return false;
  if (addresses.size() + numbers.size() + 2 + launch.behind.size() > Launch::MOST) return false;
  std::array<Value, Launch::MOST> values;
  size_t count = 0;
  for (const void* address : addresses) values[count++] = Value::of(address);
  for (const Value& number : numbers) values[count++] = number;
  values[count++] = Value::of(to.stream);
  if (to.kept) values[count++] = Value::of(to.kept->parts_at - launch.words);
  for (const Value& value : launch.behind) values[count++] = value;
  Value result;
  return launch.launcher(nullptr, values.data(), static_cast<int32_t>(count), &result) == 0;
}

inline bool enqueue(const Product& launch, const Operands& of, const void* d, double alpha, double beta) {
  const Matrix &a = launch.swapped ? of.b : of.a, &b = launch.swapped ? of.a : of.b;
  return enqueue(launch, of.device, {a.data, b.data, of.c.data, of.bias.data, d}, {Value::of(alpha), Value::of(beta)});
}

inline at::Tensor allocate(const Product& launch, c10::IntArrayRef shape, int device) {
  return at::empty(shape, at::TensorOptions().dtype(launch.dtype).device(served.type, device));
}

// D as a new tensor of that shape, which has the launch's elements in row-major order; none where Python must compute.
inline std::optional<at::Tensor> multiply(
    const Product& launch, const Operands& of, double alpha, double beta, c10::IntArrayRef shape) {
  at::Tensor d = allocate(launch, shape, of.device);
  if (!enqueue(launch, of, d.mutable_data_ptr(), alpha, beta)) return std::nullopt;
  return d;
}

}  // namespace cutegemm
