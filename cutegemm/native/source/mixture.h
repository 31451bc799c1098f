// A mixture of experts by prepared launches; cutegemm/moe.py tells of them.
#pragma once

#include "reading.h"

namespace cutegemm {

namespace in_python {
inline Hook moe{"moe"};
}

// The launches of a call, in order: those that sort its slots, those that quantize x, what copies each token's row to
// its places where nothing else brings it there, the first product in groups, those that quantize the hidden rows, the
// second product, and what adds up the rows of each token. Of weights that are not quantized nothing is.
struct Mixture {
  std::vector<Launch> sorting;    // they take experts, weights, ends, places, rows, sorted weights, row_of and counts
  int64_t counts = 0;             // numbers that they exchange
  std::optional<Quantization> of_tokens;  // where it has results for all slots, its launches take row_of
  std::vector<Launch> spreading;  // one at most, which takes x or its values, row_of and the copies
  ProgramLaunch hidden;           // of x or the copies, and what else `multiply` gives it
  std::optional<Quantization> of_hidden;  // none where the first product quantizes
  ProgramLaunch result;           // of the hidden rows, likewise
  std::vector<Launch> adding;     // they take these rows, row_of and the sums
  at::ScalarType dtype = at::ScalarType::Undefined;  // of values
};

struct ToMix {
  const at::Tensor *x = nullptr, *experts = nullptr, *weights = nullptr, *gate_up = nullptr, *down = nullptr,
                   *of_gate_up = nullptr, *of_down = nullptr,  // biases, or none
                   *scale_gate_up = nullptr, *scale_down = nullptr;  // of quantized weights
  Matrix rows, choice, weight, first, second, first_bias, second_bias, first_scale, second_scale;
  Options options;  // activation: the place of a name, or the number of what is computed (cutegemm/gating.py)
  int device = 0;

  // False where Python must look at them. Leading dimensions are merged.
  bool describe() {
    for (const at::Tensor* each : {x, experts, weights, gate_up, down, of_gate_up, of_down, scale_gate_up, scale_down})
      if (each && (!is_plain(*each) || each->device() != x->device())) return false;
    device = x->device().index();
    if (x->dim() == 0 || experts->sizes() != weights->sizes() || x->dim() != experts->dim() ||
        x->sizes().slice(0, x->dim() - 1) != experts->sizes().slice(0, x->dim() - 1))
      return false;
    const auto fits = [](const at::Tensor* tensor, Matrix& matrix) {
      return tensor == nullptr || cutegemm::describe(*tensor, matrix);
    };
    return describe_rows(*x, rows) && describe_rows(*experts, choice) && describe_rows(*weights, weight) &&
           fits(gate_up, first) && fits(down, second) && rows.dim == 2 && choice.dim == 2 && weight.dim == 2 &&
           fits(of_gate_up, first_bias) && fits(of_down, second_bias) && fits(scale_gate_up, first_scale) &&
           fits(scale_down, second_scale);
  }

  Key key() const {
    Key made;
    made.add(options.activation), made.add(0, device, options);
    made.add(rows, scale_gate_up ? 63 : 15);  // as `key_of` of what is quantized
    for (const Matrix* each : {&choice, &weight, &first, &second, &first_bias, &second_bias}) made.add(*each, 15);
    for (const Matrix* each : {&first_scale, &second_scale}) made.add(*each, 15);
    return made;
  }

  bool records() const {
    return !nothing_recorded({x, experts, weights, gate_up, down, of_gate_up, of_down, scale_gate_up, scale_down});
  }

  Found compute(at::Tensor& d) const {
    Table<Mixture>::Known known;
    const Found found = table_of<Mixture>().find(key(), known);
    if (found != Found::launch) return found;
    // Python computes all of it where it must enqueue one of the products.
    if (!have_destinations({&known->hidden, &known->result}, device)) return Found::python;
    return launch(*known, d) ? Found::launch : Found::python;
  }

 private:
  bool launch(const Mixture& how, at::Tensor& d) const {
    const int64_t top_k = choice.sizes[1], slots = choice.sizes[0] * top_k;
    const auto integers = [this](int64_t count) {
      return at::empty({count}, at::TensorOptions().dtype(at::ScalarType::Int).device(served.type, device));
    };
    const at::Tensor ends = integers(first.sizes[0]), places = integers(slots), token = integers(slots),
                     row_of = integers(slots), counts = how.counts ? integers(how.counts) : at::Tensor(),
                     sorted = at::empty({slots, 1}, weights->options().requires_grad(false));
    const auto start = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; };
    for (const Launch& step : how.sorting)
      if (!enqueue(step, device,
                   {choice.data, weight.data, start(ends), start(places), start(token), start(sorted), start(row_of),
                    start(counts)},
                   {}))
        return false;
    const auto place_of = [&](const at::Tensor& tensor) {
      Matrix made;
      made.data = start(tensor);
      return made;
    };
    const Matrix of_ends = place_of(ends), of_rows = place_of(token), of_places = place_of(places),
                 of_sorted = place_of(sorted);
    // What a product takes behind its rows.
    const auto multiply = [&](const ProgramLaunch& product, const Matrix& a, const Matrix& b, const Matrix& bias,
                              const Matrix& of_a, const Matrix& of_b, Results& made) {
      return cutegemm::compute(product, device,
                               {&a, &b, &of_ends, &of_rows, &of_places, &of_sorted, &bias, &of_a, &of_b}, {}, made);
    };
    std::optional<Quantized> values, between;
    Matrix tokens = rows, of_tokens, of_between;
    if (how.of_tokens &&
        !quantize_rows(*how.of_tokens, how.dtype, device, rows, start(row_of), values, tokens, of_tokens))
      return false;
    at::Tensor copies;
    for (const Launch& step : how.spreading) {
      const int64_t pitch = values ? values->values.stride(0) : rows.sizes[1];
      copies = at::empty({slots, pitch}, (values ? values->values : *x).options().requires_grad(false));
      const void* given = tokens.data;
      tokens = place_of(copies);
      if (!enqueue(step, device, {given, start(row_of), tokens.data}, {})) return false;
    }
    Results hidden, result;
    if (!multiply(how.hidden, tokens, first, first_bias, of_tokens, first_scale, hidden)) return false;
    Matrix of_hidden = place_of(hidden[0]);
    if (hidden.size() > 1) of_between = place_of(hidden[1]);
    if (how.of_hidden &&
        !quantize_rows(*how.of_hidden, how.dtype, device, of_hidden, nullptr, between, of_hidden, of_between))
      return false;
    if (!multiply(how.result, of_hidden, second, second_bias, of_between, second_scale, result)) return false;
    at::DimVector shape(x->sizes());
    shape.back() = result[0].size(1);
    const at::Tensor sums = at::empty(shape, result[0].options());
    for (const Launch& step : how.adding)
      if (!enqueue(step, device, {start(result[0]), start(row_of), start(sums)}, {})) return false;
    d = sums;
    return true;
  }
};

// The number of a text that says what is computed, above those of Python (cutegemm/gating.py); -1: too many.
inline int number_of_computed(Text text) {
  const int64_t found = number_of(text);
  return found == 0 ? -1 : (1 << 30) - static_cast<int>(found);
}

// The operator moe, whose hook in Python is called as hook(keys, unknown, *arguments). computed: in place of the
// activation, what `mixing.Settings.text` says.
inline at::Tensor moe_by_operator(
    FromOperator from, const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights,
    const at::Tensor& gate_up, const at::Tensor& down, Text activation, OptionalText precision, Text backend,
    const OptionalTensor& of_gate_up, const OptionalTensor& of_down, const OptionalTensor& scale_gate_up,
    const OptionalTensor& scale_down, OptionalText computed) {
  const auto pointer = [](const OptionalTensor& tensor) { return tensor ? &*tensor : nullptr; };
  ToMix of{&x, &experts, &weights, &gate_up, &down, pointer(of_gate_up), pointer(of_down), pointer(scale_gate_up),
           pointer(scale_down)};
  of.options.activation = computed ? number_of_computed(*computed) : activations.find(activation);
  of.options.take(PRECISION, precision), of.options.take(BACKEND, backend);
  Found found = Found::python;
  if (from.is_plain() && !of.records() && of.options.known() && of.describe()) {
    at::Tensor d;
    found = of.compute(d);
    if (found == Found::launch) return d;
  }
  WithInterpreter held;
  return taken(call(
      in_python::moe,
      {from.to_python(), to_python(found == Found::unknown), to_python(x), to_python(experts), to_python(weights),
       to_python(gate_up), to_python(down), to_python(OptionalText(activation)), to_python(precision),
       to_python(OptionalText(backend)), to_python(of_gate_up), to_python(of_down), to_python(scale_gate_up),
       to_python(scale_down), to_python(computed)}));
}

inline const Operator serves_moe = served_by<moe_by_operator>("moe");

// x, experts, weights, gate_up, down, their biases, their scales, activation, precision, backend
constexpr Py_ssize_t TO_MIX = 12;

// The place of an activation, or the number of what an operator computes, whose text begins with a bracket.
inline bool read_computed(PyObject* object, int& activation) {
  Text text;
  if (!read_text(object, text)) return false;
  const bool is_name = text.empty() || text[0] != '[';
  activation = is_name ? activations.find(text) : number_of_computed(text);
  return activation >= 0;
}

inline bool read(PyObject* const* args, ToMix& of) {
  const at::Tensor** tensors[] = {&of.x,          &of.experts, &of.weights,       &of.gate_up,   &of.down,
                                  &of.of_gate_up, &of.of_down, &of.scale_gate_up, &of.scale_down};
  for (size_t i = 0; i < std::size(tensors); ++i)
    if (!read_tensor(args[i], *tensors[i]) || (i < 5 && !*tensors[i])) return false;
  if (PyLong_CheckExact(args[9]))
    of.options.activation = static_cast<int>(PyLong_AsLong(args[9]));
  else if (!read_computed(args[9], of.options.activation))
    return false;
  return read_how(args + 10, 2, of.options) && of.describe();
}

// mixture(<as above>) -> the mixture
inline PyObject* mixture(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  ToMix of;
  if (count != TO_MIX || state_of_thread() != Thread::plain || !read(args, of) || of.records()) Py_RETURN_NONE;
  return answered([&](at::Tensor& d) { return of.compute(d); });
  END_HANDLE_TH_ERRORS
}

// install_mixture(<as above>, how): how is None, or (launchers that sort, number of counts, launchers that copy, both
// products as `read_program` has them, launchers that add up, quantizing). quantizing: None, or how x and the hidden
// rows are quantized, each as `read_quantization` has it, and the dtype of their values. Hidden rows that the first
// product quantizes have None; its second result is their scales.
inline PyObject* install_mixture(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  ToMix of;
  if (count != TO_MIX + 1 || !read(args, of)) Py_RETURN_FALSE;
  std::shared_ptr<Mixture> known;
  if (args[TO_MIX] != Py_None) {
    known = std::make_shared<Mixture>();
    PyObject *steps = nullptr, *spreading = nullptr, *hidden = nullptr, *result = nullptr, *adding = nullptr,
             *quantizing = nullptr;
    long long counts = 0;
    if (!PyArg_ParseTuple(args[TO_MIX], "O!LO!OOO!O", &PyTuple_Type, &steps, &counts, &PyTuple_Type, &spreading,
                          &hidden, &result, &PyTuple_Type, &adding, &quantizing))
      throw_python_error();
    read_launches(steps, known->sorting), read_launches(spreading, known->spreading);
    read_launches(adding, known->adding);
    known->counts = counts;
    read_program(hidden, known->hidden), read_program(result, known->result);
    if (quantizing != Py_None) {
      PyObject *of_tokens = nullptr, *of_hidden = nullptr, *dtype = nullptr;
      int number = -1;
      if (!PyArg_ParseTuple(quantizing, "OOO", &of_tokens, &of_hidden, &dtype)) throw_python_error();
      TORCH_CHECK(read_dtype(dtype, number) && number >= 0, "cutegemm: expected a torch.dtype");
      known->dtype = static_cast<at::ScalarType>(number);
      read_quantization(of_tokens, known->of_tokens.emplace());
      if (of_hidden != Py_None) read_quantization(of_hidden, known->of_hidden.emplace());
      for (const auto* each : {&known->of_tokens, &known->of_hidden})
        TORCH_CHECK(!*each || (*each)->scales, "cutegemm: expected new scales");
    }
  }
  table_of<Mixture>().put(of.key(), std::move(known));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

inline const Methods of_mixture{{"mixture", mixture}, {"install_mixture", install_mixture}};

}  // namespace cutegemm
