#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace megashard {

/// for_each_tensor(value, f) calls f(at::Tensor&) for every tensor in a value: tensors, and nested optionals, pairs,
/// tuples, arrays, vectors and maps of them. A user's struct takes part by a member
///     template <class F> void visit_tensors(F&& f) { f(field); ... }
/// whose f accepts anything that for_each_tensor does. Other types hold no tensors.
template <class F>
void for_each_tensor(at::Tensor& tensor, F& f) {
  f(tensor);
}

template <class T, class F>
void for_each_tensor(T& value, F& f);

namespace detail {

template <class T>
struct Contained {
  template <class F>
  static void visit(T& value, F& f) {
    auto each = [&f](auto& field) { for_each_tensor(field, f); };
    if constexpr (requires { value.visit_tensors(each); }) value.visit_tensors(each);
  }
};

template <class T>
struct Contained<std::optional<T>> {
  template <class F>
  static void visit(std::optional<T>& value, F& f) {
    if (value.has_value()) for_each_tensor(*value, f);
  }
};

template <class Range>
struct ContainedRange {
  template <class F>
  static void visit(Range& values, F& f) {
    for (auto& value : values) for_each_tensor(value, f);
  }
};

template <class T, class A>
struct Contained<std::vector<T, A>> : ContainedRange<std::vector<T, A>> {};
template <class A>
struct Contained<std::vector<bool, A>> {  // its elements are proxies, never tensors
  template <class F>
  static void visit(std::vector<bool, A>&, F&) {}
};
template <class T, size_t N>
struct Contained<std::array<T, N>> : ContainedRange<std::array<T, N>> {};

template <class Map>
struct ContainedMap {
  template <class F>
  static void visit(Map& entries, F& f) {
    for (auto& [key, value] : entries) for_each_tensor(value, f);
  }
};
template <class K, class T, class C, class A>
struct Contained<std::map<K, T, C, A>> : ContainedMap<std::map<K, T, C, A>> {};
template <class K, class T, class H, class E, class A>
struct Contained<std::unordered_map<K, T, H, E, A>> : ContainedMap<std::unordered_map<K, T, H, E, A>> {};

template <class... Ts>
struct Contained<std::tuple<Ts...>> {
  template <class F>
  static void visit(std::tuple<Ts...>& values, F& f) {
    std::apply([&f](auto&... value) { (for_each_tensor(value, f), ...); }, values);
  }
};
template <class A, class B>
struct Contained<std::pair<A, B>> {
  template <class F>
  static void visit(std::pair<A, B>& value, F& f) {
    for_each_tensor(value.first, f);
    for_each_tensor(value.second, f);
  }
};

}  // namespace detail

template <class T, class F>
void for_each_tensor(T& value, F& f) {
  detail::Contained<T>::visit(value, f);
}

}  // namespace megashard
