// The card of the stand-in: torch's device "hpu", whose memory is the host's and whose ops are those of the CPU.
//
// Every op on its tensors comes to `run_op`, which refuses tensors of the host among them, notes the op and its types, and
// hands the CPU's op the same memory. So tensors of the card are torch's own, with storages, views and no Python between:
// what captures or compiles them sees what it would see of a card.
//
// As on a card: memory is counted, and what is freed stays taken until ops are launched (`card_mark_step`); a lack of memory
// is told by the next look at a value, and until then nothing is computed, so results are garbage.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto HPU = c10::DeviceType::HPU;
const c10::Device THE_CARD(HPU, 0);

// A copy to the host that nobody has waited for: until then there is garbage.
struct Coming {
  int64_t number;
  at::Tensor to, from;  // both of the host
};

// A place in the queue, and what was not told when it was reached.
struct Mark {
  int64_t number;
  std::string error;
};

struct State {
  std::mutex mutex;
  bool lazy = true;
  bool short_e4m3 = false;  // it ends at 240: what is beyond means no number
  int64_t limit = INT64_MAX;
  int64_t graphs = 0;   // bytes of captured graphs, as Python counts them
  int64_t live = 0;     // bytes of tensors
  int64_t pending = 0;  // freed, but what was gathered still uses them
  int64_t peak = 0;
  int64_t allocations = 0;
  int64_t fails_at = 0;  // the number of the allocation that fails
  int64_t reads = 0;     // looks at a value, and copies to the host: both launch what was gathered
  std::string error;     // not told yet
  int64_t copies = 0;    // to the host, that nobody waits for
  int64_t marks = 0;
  std::vector<Coming> coming;
  std::map<int64_t, Mark> marked;
  std::map<std::pair<std::string, uint64_t>, int64_t> ops;  // name and types -> calls
};

State& state() {
  static State* it = new State;  // tensors may outlive everything else
  return *it;
}

thread_local bool capturing = false;
thread_local bool uncounted = false;  // what a graph computes in is counted as the graph's

int64_t in_use(const State& s) { return s.live + s.pending + s.graphs; }

// With the state's mutex: what an allocation that fails says; nothing if there is room.
std::string refuse(State& s, int64_t bytes) {
  s.allocations++;
  s.peak = std::max(s.peak, in_use(s));
  if (s.allocations != s.fails_at && in_use(s) <= s.limit) return "";
  return "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::" + std::to_string(bytes) + " (" +
      std::to_string(bytes >> 20) + ")MB";
}

void take(int64_t bytes) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.live += bytes;
  std::string said = refuse(s, bytes);
  if (s.error.empty()) s.error = said;
}

void give(int64_t bytes) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.live -= bytes;
  if (s.lazy) s.pending += bytes;
}

bool is_broken() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return !s.error.empty();
}

// Copies up to this one are there.
void arrive(int64_t number) {
  State& s = state();
  std::vector<Coming> there;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    auto rest = std::stable_partition(
        s.coming.begin(), s.coming.end(), [&](const Coming& each) { return each.number <= number; });
    there.assign(s.coming.begin(), rest);
    s.coming.erase(s.coming.begin(), rest);
  }
  for (auto& each : there) memcpy(each.to.mutable_data_ptr(), each.from.const_data_ptr(), each.from.nbytes());
}

// All that was launched is done: an error that is due is told now.
void settle(const char* what) {
  TORCH_CHECK(!capturing, what, " looks at a value on the host while a graph is captured");
  State& s = state();
  std::string error;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.pending = 0;
    s.reads++;
    error.swap(s.error);
  }
  arrive(INT64_MAX);
  TORCH_CHECK(error.empty(), error);
}

// Memory of the host that a storage of the card keeps.
struct Held {
  c10::Storage storage;
  int64_t bytes;
};

c10::DataPtr hold(c10::Storage host) {
  void* data = host.mutable_data();
  int64_t bytes = uncounted ? 0 : host.nbytes();
  if (!uncounted) take(bytes);
  auto* held = new Held{std::move(host), bytes};
  return c10::DataPtr(
      data,
      held,
      [](void* held) {
        give(static_cast<Held*>(held)->bytes);
        delete static_cast<Held*>(held);
      },
      THE_CARD);
}

c10::Storage storage_on_card(const c10::Storage& host) {
  size_t bytes = host.nbytes();
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, hold(host), nullptr, false));
}

at::Tensor make(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The tensors of one call: those of the card, and what stands for them on the host.
class Hosts {
 public:
  at::Tensor host(const at::Tensor& card) {
    if (!card.defined() || !card.device().is_hpu()) return card;
    auto* from = card.storage().unsafeGetStorageImpl();
    auto found = storages_.find(from);
    if (found == storages_.end()) {
      c10::DataPtr data(
          card.storage().mutable_data(),
          new c10::Storage(card.storage()),
          [](void* kept) { delete static_cast<c10::Storage*>(kept); },
          c10::Device(c10::kCPU));
      c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), card.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true));
      found = storages_.emplace(from, storage).first;
      cards_.emplace(storage.unsafeGetStorageImpl(), card.storage());
    }
    at::Tensor made = make(found->second, c10::DispatchKey::CPU, card);
    if (card.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs_.emplace_back(made, card);
    return made;
  }

  at::Tensor card(const at::Tensor& host, bool garbage) {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (auto& [there, card] : pairs_)
      if (there.is_same(host)) return card;
    auto* storage = host.storage().unsafeGetStorageImpl();
    for (auto& [there, card] : pairs_) {
      if (there.storage().unsafeGetStorageImpl() != storage) continue;
      // A view. Of a tensor that is not inference's it is not, either, whatever the mode.
      auto made = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(card.storage()), card.key_set(), host.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      return made;
    }
    auto found = cards_.find(storage);
    if (found == cards_.end()) {
      found = cards_.emplace(storage, storage_on_card(host.storage())).first;
      if (garbage) memset(host.storage().mutable_data(), 0xff, host.storage().nbytes());
    }
    return make(found->second, c10::DispatchKey::HPU, host);
  }

  // What the op has made of its arguments' shapes and sizes.
  void take_back() {
    for (auto& [host, card] : pairs_) {
      auto storage = host.storage();
      if (storage.data() != card.storage().data() && cards_.count(storage.unsafeGetStorageImpl())) {
        auto* target = card.storage().unsafeGetStorageImpl();
        size_t bytes = storage.nbytes();
        target->set_data_ptr_noswap(hold(storage));
        target->set_nbytes(bytes);
      }
      if (host.sizes() != card.sizes() || host.strides() != card.strides() ||
          host.storage_offset() != card.storage_offset())
        card.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  std::vector<std::pair<at::Tensor, std::string>> keep() {
    std::vector<std::pair<at::Tensor, std::string>> kept;
    for (auto& [host, card] : pairs_)
      kept.emplace_back(host, std::string(static_cast<const char*>(host.storage().data()), host.storage().nbytes()));
    return kept;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // of the card -> of the host
  std::unordered_map<c10::StorageImpl*, c10::Storage> cards_;
};

template <class F>
void each_tensor(const c10::IValue& value, F visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
    for (const c10::IValue& inner : value.toListRef()) each_tensor(inner, visit);
  } else if (value.isTuple()) {
    for (const c10::IValue& inner : value.toTupleRef().elements()) each_tensor(inner, visit);
  }
}

template <class F>
c10::IValue change(const c10::IValue& value, F turn) {
  if (value.isTensor()) return turn(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& each : value.toTensorVector()) out.push_back(turn(each));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const c10::IValue& each : value.toListRef())
      out.push_back(each.isNone() ? std::nullopt : std::optional<at::Tensor>(turn(each.toTensor())));
    return out;
  }
  if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
    c10::List<c10::List<at::Tensor>> out;
    for (const c10::IValue& each : value.toListRef()) out.push_back(change(each, turn).toTensorList());
    return out;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> out;
    for (const c10::IValue& each : value.toTupleRef().elements()) out.push_back(change(each, turn));
    return c10::ivalue::Tuple::create(std::move(out));
  }
  return value;
}

void note(const c10::OperatorHandle& op, uint64_t types, const char* more = "") {
  State& s = state();
  const auto& name = op.operator_name();
  std::string words = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  std::lock_guard<std::mutex> lock(s.mutex);
  s.ops[{words + more, types}]++;
}

// Sorts that Intel's software leaves to the host.
bool is_long_and_stable(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t count) {
  auto at = [&](const char* name) -> c10::IValue {
    auto index = op.schema().argumentIndexWithName(name);
    return index ? stack[stack.size() - count + *index] : c10::IValue();
  };
  c10::IValue self = at("self"), stable = at("stable"), dim = at("dim");
  if (!self.isTensor() || !stable.isBool() || !stable.toBool() || !dim.isInt()) return false;
  int64_t rank = self.toTensor().dim(), along = dim.toInt() < 0 ? dim.toInt() + rank : dim.toInt();
  return along == 0 || self.toTensor().size(along) > 37;
}

// FP8 that are moved and not computed with: the CPU has no op for some of these.
bool moves_bytes(const std::string& name) {
  return name == "aten::index_copy_" || name == "aten::index_copy" || name == "aten::index_select" ||
      name == "aten::index" || name == "aten::cat";
}

at::Tensor seen_as(const at::Tensor& tensor, at::ScalarType from, at::ScalarType to) {
  if (!tensor.defined() || tensor.scalar_type() != from) return tensor;
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), tensor.key_set(), c10::scalarTypeToTypeMeta(to));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

// Whether what an op returns cannot be known before the values are.
bool looks_at_values(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t count) {
  const std::string& name = op.operator_name().name;
  if (name == "aten::index") {
    bool by_mask = false;
    each_tensor(stack[stack.size() - count + 1], [&](const at::Tensor& index) {
      by_mask = by_mask || (index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte));
    });
    return by_mask;
  }
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return true;
  for (const auto& returned : op.schema().returns()) {
    auto kind = returned.type()->kind();
    if (kind == c10::TypeKind::BoolType || kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType ||
        kind == c10::TypeKind::NumberType)
      return true;
  }
  return false;
}

void run_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  const std::string& name = op.operator_name().name;
  bool on_card = false, on_host = false;
  uint64_t types = 0;
  for (size_t i = stack->size() - count; i < stack->size(); i++) {
    each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.device().is_hpu()) {
        on_card = true;
        types |= uint64_t(1) << int(tensor.scalar_type());
      } else if (tensor.dim() || capturing) {
        on_host = on_host || !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      }
    });
  }
  TORCH_CHECK(
      !(on_card && on_host),
      "Expected all tensors to be on the same device, but found at least two devices, hpu:0 and cpu! (", name, ")");
  note(op, types, name == "aten::sort" && is_long_and_stable(op, *stack, count) ? "(long_and_stable)" : "");
  if (on_card && name.rfind("aten::", 0) == 0 && looks_at_values(op, *stack, count)) settle(name.c_str());

  at::AutoDispatchBelowADInplaceOrView below;
  Hosts hosts;
  bool as_bytes = (types >> int(at::kFloat8_e4m3fn) & 1) && moves_bytes(name);
  for (size_t i = stack->size() - count; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isDevice()) {
      if (value.toDevice().is_hpu()) value = c10::Device(c10::kCPU);
    } else {
      value = change(value, [&](const at::Tensor& tensor) {
        at::Tensor host = hosts.host(tensor);
        return as_bytes ? seen_as(host, at::kFloat8_e4m3fn, at::kByte) : host;
      });
    }
  }
  bool garbage = is_broken();
  auto kept = garbage ? hosts.keep() : std::vector<std::pair<at::Tensor, std::string>>();
  try {
    op.callBoxed(stack);
  } catch (...) {
    if (garbage) settle(name.c_str());  // it was garbage that the op did not like
    throw;
  }
  for (auto& [host, bytes] : kept)
    if (host.storage().nbytes() == bytes.size()) memcpy(host.storage().mutable_data(), bytes.data(), bytes.size());
  hosts.take_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = change((*stack)[i], [&](const at::Tensor& tensor) {
      return hosts.card(as_bytes ? seen_as(tensor, at::kByte, at::kFloat8_e4m3fn) : tensor, garbage);
    });
}

c10::Storage new_storage(int64_t bytes) {
  c10::Storage host(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true));
  c10::Storage card = storage_on_card(host);
  if (is_broken()) memset(host.mutable_data(), 0xff, bytes);
  return card;
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  auto type = c10::scalarTypeToTypeMeta(dtype.value_or(at::get_default_dtype_as_scalartype()));
  int64_t bytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      new_storage(bytes), c10::DispatchKeySet(c10::DispatchKey::HPU), type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pinned,
    std::optional<at::MemoryFormat> format) {
  std::vector<int64_t> stride(size.size());
  int64_t step = 1;
  for (size_t i = size.size(); i-- > 0; step *= std::max<int64_t>(size[i], 1)) stride[i] = step;
  auto made = empty_strided(size, stride, dtype, layout, device, pinned);
  if (format && *format != at::MemoryFormat::Preserve && *format != at::MemoryFormat::Contiguous)
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

// Of the host and in e4m3: what is beyond 240 becomes no number.
at::Tensor cut(const at::Tensor& e4m3) {
  at::Tensor there = e4m3.clone(at::MemoryFormat::Contiguous);
  auto* bytes = static_cast<uint8_t*>(there.mutable_data_ptr());
  for (int64_t i = 0; i < there.numel(); i++)
    if ((bytes[i] & 0x7f) > 0x77) bytes[i] |= 0x7f;
  return there;
}

// Of the host: what a copy to this type takes. One to the same type moves bytes, whatever they mean.
at::Tensor as_cast(const at::Tensor& from, at::ScalarType to) {
  if (from.scalar_type() == to || !state().short_e4m3) return from;
  if (to == at::kFloat8_e4m3fn) return cut(from.to(to));
  return from.scalar_type() == at::kFloat8_e4m3fn ? cut(from) : from;
}

// What is copied to the host without waiting is taken now and arrives later.
at::Tensor& copy_later(at::Tensor& self, const at::Tensor& from) {
  TORCH_CHECK(!capturing, "a copy to the host while a graph is captured");
  at::AutoDispatchBelowADInplaceOrView below;
  Hosts hosts;
  TORCH_CHECK(self.is_contiguous() && self.sizes() == from.sizes(), "a copy to the host without waiting is of whole tensors");
  at::Tensor taken = as_cast(hosts.host(from), self.scalar_type()).to(self.scalar_type()).clone(at::MemoryFormat::Contiguous);
  memset(self.mutable_data_ptr(), 0xff, self.nbytes());
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.pending = 0;
  s.reads++;
  if (s.error.empty()) s.coming.push_back({++s.copies, self, taken});
  return self;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  bool garbage = false;
  if (self.device().is_cpu() && non_blocking) return copy_later(self, from);
  if (self.device().is_cpu()) {
    settle("a copy to the host");
  } else {
    TORCH_CHECK(from.device().is_hpu() || !capturing, "a tensor of the host is copied to the card while a graph is captured");
    garbage = is_broken();
  }
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  uint64_t types = uint64_t(1) << int(self.scalar_type()) | uint64_t(1) << int(from.scalar_type());
  note(op, types);
  at::AutoDispatchBelowADInplaceOrView below;
  Hosts hosts;
  at::Tensor there = hosts.host(self);
  if (!garbage) there.copy_(as_cast(hosts.host(from), self.scalar_type()));
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  settle("a look at a number");
  at::AutoDispatchBelowADInplaceOrView below;
  Hosts hosts;
  return at::_local_scalar_dense(hosts.host(self));
}

// Attention of torch itself is put together from other ops: there is none of its fused ones.
void choose_math(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->push_back(int64_t(0));
}

at::Tensor to_host(const at::Tensor& card) {
  Hosts hosts;
  return hosts.host(card);
}

at::Tensor to_card(const at::Tensor& host) {
  Hosts hosts;
  return hosts.card(host, is_broken());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return HPU; }
  c10::Device exchangeDevice(c10::Device) const override { return THE_CARD; }
  c10::Device getDevice() const override { return THE_CARD; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, THE_CARD); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(THE_CARD); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(HPU, Guard);

TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_op>()); }

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_op>());  // which torch would take apart
  m.impl("_fused_sdp_choice", torch::CppFunction::makeFromBoxedFunction<&choose_math>());
}

// The same memory as a tensor of the other device. No copy, and nothing is told: this is how the stand-in computes.
TORCH_LIBRARY(hpu_emulated, m) {
  m.def("host(Tensor card) -> Tensor");
  m.def("card(Tensor host) -> Tensor");
}
TORCH_LIBRARY_IMPL(hpu_emulated, CompositeExplicitAutograd, m) {
  m.impl("host", to_host);
  m.impl("card", to_card);
}

}  // namespace

extern "C" {

void card_set(const char* name, int64_t value) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::string wanted(name);
  if (wanted == "lazy") s.lazy = value;
  if (wanted == "short_e4m3") s.short_e4m3 = value;
  if (wanted == "limit") s.limit = value;
  if (wanted == "peak") s.peak = value;
  if (wanted == "fails_at") s.fails_at = value ? s.allocations + value : 0;
  if (wanted == "capturing") capturing = value;
  if (wanted == "uncounted") uncounted = value;
}

int64_t say(const std::string& words, char* text, int64_t size) {
  memcpy(text, words.data(), std::min<int64_t>(size, words.size()));
  return words.size();
}

// Memory for a graph, or back from one: that is told at once.
int64_t card_take_for_graph(int64_t bytes, char* text, int64_t size) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.graphs += bytes;
  std::string said = bytes > 0 ? refuse(s, bytes) : "";
  if (!said.empty()) s.graphs -= bytes;
  return say(said, text, size);
}

int64_t card_get(const char* name) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::string wanted(name);
  if (wanted == "in_use") return in_use(s);
  if (wanted == "graphs") return s.graphs;
  if (wanted == "live") return s.live;
  if (wanted == "peak") return s.peak;
  if (wanted == "allocations") return s.allocations;
  if (wanted == "reads") return s.reads;
  if (wanted == "broken") return !s.error.empty();
  return -1;
}

void card_mark_step() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.pending = 0;
}

// The error that is due, or nothing; it is told once.
int64_t card_take_error(char* text, int64_t size) {
  State& s = state();
  std::string error;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.pending = 0;
    error.swap(s.error);
  }
  arrive(INT64_MAX);
  return say(error, text, size);
}

// A place in the queue: its number.
int64_t card_mark() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.marked[++s.marks] = {s.copies, s.error};
  return s.marks;
}

// Until it is reached: what is due by then. Who waited on another thread may have been told already.
int64_t card_wait(int64_t mark, char* text, int64_t size) {
  State& s = state();
  Mark reached;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    auto found = s.marked.find(mark);
    if (found == s.marked.end()) return 0;
    reached = found->second;
    s.marked.erase(found);
    if (!reached.error.empty() && s.error == reached.error) s.error.clear();
  }
  arrive(reached.number);
  return say(reached.error, text, size);
}

// "name types calls" of each op that ran, line by line; types are bits.
int64_t card_ops(char* text, int64_t size) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::string all;
  for (auto& [key, calls] : s.ops)
    all += key.first + " " + std::to_string(key.second) + " " + std::to_string(calls) + "\n";
  return say(all, text, size);
}
}
