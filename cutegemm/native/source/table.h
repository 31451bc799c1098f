// Prepared launches by what a call looks like, and the workspaces of streams.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <shared_mutex>
#include <unordered_map>

#include "plain.h"

namespace cutegemm {

// What a plan depends on: as `call.description` in Python.
struct Key {
  int count = 0;
  uint64_t hash = 1469598103934665603u;
  std::array<int64_t, 64> words;  // written up to `count`; a mixture has most, 3 + 3 x 5 + 6 x 7

  void add(int64_t word) {
    words[count++] = word;
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }

  void add(const Matrix& matrix, uintptr_t alignment) {
    const auto rest = reinterpret_cast<uintptr_t>(matrix.data) & alignment;
    add((static_cast<int64_t>(matrix.dtype) << 16) | (static_cast<int64_t>(rest) << 8) | matrix.dim);
    for (int i = 0; i < matrix.dim; ++i) add(matrix.sizes[i]), add(matrix.strides[i]);
  }

  // flags: the lowest 16 bits alone
  void add(int64_t flags, int device, const Options& options) {
    static_assert(FIELDS <= 12);  // of four bits each, which `configure` checks
    for (int i = 0; i < FIELDS; ++i) flags |= static_cast<int64_t>(options.how[i]) << (16 + 4 * i);
    add(flags), add((static_cast<int64_t>(device) << 32) | static_cast<uint32_t>(options.out_dtype));
  }

  bool operator==(const Key& other) const {
    return count == other.count && hash == other.hash &&
           std::memcmp(words.data(), other.words.data(), count * sizeof(int64_t)) == 0;
  }
};

struct Operands {
  Matrix a, b, c, bias, out;
  int device = 0;
};

inline Key key_of(const Operands& of, double beta, const Options& options) {
  Key key;
  key.add((beta == 0) | (!!of.c << 1) | (!!of.bias << 2) | (!!of.out << 3) | (options.activation << 8), of.device,
          options);
  key.add(of.a, 15), key.add(of.b, 15);
  if (of.c) key.add(of.c, 15);
  if (of.bias) key.add(of.bias, 3);
  if (of.out) key.add(of.out, 15);
  return key;
}

struct HashOfKey {
  size_t operator()(const Key& key) const { return key.hash; }
};

// An argument of a launcher, as TVM-FFI's C interface lays it out.
struct Value {
  int32_t type = 0, zero = 0;
  union {
    int64_t integer = 0;
    double number;
  };

  static constexpr int32_t INTEGER = 1, NUMBER = 3;
  static Value of(int64_t value) {
    Value made;
    made.type = INTEGER, made.integer = value;
    return made;
  }
  static Value of(const void* value) { return of(reinterpret_cast<int64_t>(value)); }
  static Value of(double value) {
    Value made;
    made.type = NUMBER, made.number = value;
    return made;
  }
};
static_assert(sizeof(Value) == 16);

// Enqueues a kernel on the current device: 0 when it has.
using Launcher = int (*)(void* self, const Value* arguments, int32_t count, Value* result);

// A kernel bound to a problem. It takes addresses, numbers, the stream, a workspace if it has one, and `behind`.
struct Launch {
  Launcher launcher = nullptr;
  int64_t words = 0, parts = 0;  // bytes of a workspace; without either there is none
  std::vector<Value> behind;

  static constexpr size_t MOST = 96;  // arguments
};

// A launch that computes a new matrix, or one given.
struct Product : Launch {
  std::vector<int64_t> shape;  // of D
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool swapped = false;  // computed as D^T = B^T A^T
};

enum class Found {
  launch,   // it can be computed here
  python,   // Python computes it
  unknown,  // nobody has planned it yet
};

// A table of calls; all of them are counted, and forgotten, together.
class AnyTable {
 public:
  AnyTable() { all().push_back(this); }
  AnyTable(const AnyTable&) = delete;
  AnyTable& operator=(const AnyTable&) = delete;

  virtual void clear() = 0;
  virtual size_t size() const = 0;

  static std::vector<AnyTable*>& all() { return kept<std::vector<AnyTable*>>(); }

 protected:
  ~AnyTable() = default;
};

// Key -> what computes it; a null pointer says that Python serves these calls.
template <typename What>
class Table final : public AnyTable {
 public:
  using Known = std::shared_ptr<const What>;

  Found find(const Key& key, Known& found) const {
    std::shared_lock lock(mutex_);
    const auto place = known_.find(key);
    if (place == known_.end()) return Found::unknown;
    found = place->second;
    return found ? Found::launch : Found::python;
  }

  void put(const Key& key, Known what) {
    std::unique_lock lock(mutex_);
    if (known_.size() >= MOST) known_.clear();  // Python remembers the plans, and puts what is needed again
    known_[key] = std::move(what);
  }

  void clear() override {
    std::unique_lock lock(mutex_);
    known_.clear();
  }

  size_t size() const override {
    std::shared_lock lock(mutex_);
    return known_.size();
  }

 private:
  static constexpr size_t MOST = 4096;
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, Known, HashOfKey> known_;
};

using Known = Table<Product>::Known;

// The workspaces that cutegemm/cute/workspace.py keeps, by device and stream.
class Workspaces {
 public:
  struct Kept {
    at::Tensor memory;
    int64_t parts_at, words, parts;
  };

  std::optional<Kept> find(int device, void* stream) const {
    std::shared_lock lock(mutex_);
    const auto place = kept_.find({device, stream});
    if (place == kept_.end()) return std::nullopt;
    return place->second;
  }

  void put(int device, void* stream, Kept kept) {
    std::unique_lock lock(mutex_);
    kept_[{device, stream}] = std::move(kept);
  }

  void clear() {
    std::map<std::pair<int, void*>, Kept> freed;  // outside the lock: freeing may take torch's own locks
    std::unique_lock lock(mutex_);
    freed.swap(kept_);
    lock.unlock();
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<std::pair<int, void*>, Kept> kept_;
};

// The table of a kind of calls, made when the module is loaded. It is never freed: threads may look into it while the
// process ends.
template <typename What>
inline Table<What>& the_table = *new Table<What>;

template <typename What>
Table<What>& table_of() {
  return the_table<What>;
}

inline Workspaces& workspaces() { return kept<Workspaces>(); }

}  // namespace cutegemm
