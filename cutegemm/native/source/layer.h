// A layer of 8 bits: x is quantized and multiplied with the weight, which is quantized already.
#pragma once

#include "scaled.h"

namespace cutegemm {

namespace in_python {
inline Hook quantized_linear{"quantized_linear"};
}

// act(x (weight weight_scale)^T + bias); x has any dimensions. Of a gated activation the weight is [gate; up].
struct Layer {
  const at::Tensor *x = nullptr, *weight = nullptr, *weight_scale = nullptr, *input_scale = nullptr, *bias = nullptr;
  int scaling = 0;
  Options options;

  bool records() const {
    return !nothing_recorded({x, weight, weight_scale, input_scale, bias});
  }

  // Where both of its steps are known.
  Found compute(at::Tensor& d) const {
    static const int best = quantizers.find(Text("auto"));
    ToScale second;
    ToQuantize first;
    if (!options.known() || scaling < 0 || !second.describe(weight, weight, nullptr, weight_scale, bias) ||
        x->device() != weight->device() || second.b.dim != 2 || !describe_rows(*x, first.x) || first.x.dim != 2 ||
        first.x.sizes[1] != second.b.sizes[1])
      return Found::python;
    first.device = second.device, first.dtype = weight->scalar_type();
    first.scaling = input_scale ? 0 : scaling;
    // A backend that takes no part in quantization leaves it to the best one there is.
    const int backend = quantizers.find(name_of_backend());
    first.backend = backend < 0 ? best : backend;
    if (!first.describe_scale(input_scale)) return Found::python;
    Table<Quantization>::Known how;
    Found found = look_up(first, how);
    if (found != Found::launch) return found;
    Quantized made(*how, first, input_scale);
    if (!describe(made.values, second.a) || !describe(made.scales, second.scale_a)) return Found::python;
    second.b = second.b.turned();
    if (second.scale_b.dim == 2) second.scale_b = second.scale_b.turned();
    Options of_product = options;
    of_product.out_dtype = static_cast<int>(x->scalar_type());
    Table<ScaledProduct>::Known launch;
    found = look_up(second, of_product, launch);
    if (found != Found::launch) return found;
    // Python does both steps again where it must enqueue the second one: then the first one is left to it, too.
    if (!Destination().find(*launch, second.device) || !made.launch(*how, first)) return Found::python;
    at::DimVector shape(x->sizes());
    shape.back() = launch->results[0].shape.back();
    return multiply(*launch, second, d, shape) ? Found::launch : Found::python;
  }

 private:
  OptionalText name_of_backend() const {
    const int place = options.how[BACKEND];
    return place == 0 ? OptionalText() : OptionalText(Text(accepted[BACKEND].known[place - 1]));
  }
};

// The operator quantized_linear, whose hook in Python is called as hook(keys, unknown, *arguments).
template <typename... Texts>
at::Tensor quantized_linear_by_operator(
    FromOperator from, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& weight_scale,
    const std::optional<at::Tensor>& input_scale, const std::optional<at::Tensor>& bias, Text scaling,
    OptionalText activation, Texts... how) {
  Layer layer{&x, &weight, &weight_scale, input_scale ? &*input_scale : nullptr, bias ? &*bias : nullptr};
  layer.scaling = scalings.find(scaling), layer.options.activation = layer_activations.find(activation);
  int field = 0;
  (layer.options.take(field++, how), ...);
  Found found = Found::python;
  if (from.is_plain() && !layer.records()) {
    at::Tensor d;
    found = layer.compute(d);
    if (found == Found::launch) return d;
  }
  WithInterpreter held;
  std::vector<PyObject*> given{
      from.to_python(), to_python(found == Found::unknown), to_python(x), to_python(weight), to_python(weight_scale),
      to_python(input_scale), to_python(bias), to_python(OptionalText(scaling)), to_python(activation)};
  (given.push_back(to_python(OptionalText(how))), ...);
  return taken(call(in_python::quantized_linear, given));
}

inline const Operator serves_quantized_linear = served_by<quantized_linear_by_operator<OPTION_TYPES>>("quantized_linear");

}  // namespace cutegemm
