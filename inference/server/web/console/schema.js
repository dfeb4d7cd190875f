// Whether a value obeys a JSON schema, as far as this page reads schemas.

const MAX_DEPTH = 64; // a schema may refer to itself
const ANNOTATIONS = new Set([
  ...["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"],
  ...["$schema", "$id", "$comment", "$defs", "definitions", "nullable"],
]);

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isText = (value) => typeof value === "string";
const isNumber = (value) => typeof value === "number";
const TYPES = {
  string: isText,
  number: isNumber,
  integer: Number.isInteger,
  boolean: (value) => typeof value === "boolean",
  null: (value) => value === null,
  array: Array.isArray,
  object: isObject,
};

const quote = (value) => JSON.stringify(value);
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

function isSame(left, right) {
  if (Array.isArray(left) && Array.isArray(right))
    return left.length === right.length && left.every((item, at) => isSame(item, right[at]));
  if (!isObject(left) || !isObject(right)) return left === right;
  const names = Object.keys(left);
  return (
    names.length === Object.keys(right).length &&
    names.every((name) => Object.hasOwn(right, name) && isSame(left[name], right[name]))
  );
}

/** A keyword that bounds values of one type; `wrong` says so, or returns a falsy value. */
const bound = (isMeant, wrong) => (check, limit, value, path) => {
  if (isMeant(value)) check.report(path, wrong(value, limit));
};

const KEYWORDS = {
  type(check, types, value, path) {
    const names = [types].flat();
    const wrong = !names.some((name) => TYPES[name]?.(value));
    check.report(path, wrong && `must be of type ${names.join(" or ")}`);
  },
  enum(check, values, value, path) {
    const wrong = !values.some((option) => isSame(option, value));
    check.report(path, wrong && `must be one of ${values.map(quote).join(", ")}`);
  },
  const(check, option, value, path) {
    check.report(path, !isSame(option, value) && `must be ${quote(option)}`);
  },
  minimum: bound(isNumber, (value, least) => value < least && `must be at least ${least}`),
  maximum: bound(isNumber, (value, most) => value > most && `must be at most ${most}`),
  exclusiveMinimum: bound(isNumber, (value, low) => value <= low && `must be above ${low}`),
  exclusiveMaximum: bound(isNumber, (value, high) => value >= high && `must be below ${high}`),
  minLength: bound(isText, (value, least) =>
    [...value].length < least && `must have at least ${count(least, "character")}`),
  maxLength: bound(isText, (value, most) =>
    [...value].length > most && `must have at most ${count(most, "character")}`),
  pattern: bound(isText, (value, pattern) =>
    !new RegExp(pattern, "u").test(value) && `must match ${pattern}`),
  minItems: bound(Array.isArray, (value, least) =>
    value.length < least && `must have at least ${count(least, "item")}`),
  maxItems: bound(Array.isArray, (value, most) =>
    value.length > most && `must have at most ${count(most, "item")}`),
  minProperties: bound(isObject, (value, least) =>
    Object.keys(value).length < least && `must have at least ${count(least, "name")}`),
  maxProperties: bound(isObject, (value, most) =>
    Object.keys(value).length > most && `must have at most ${count(most, "name")}`),
  required(check, names, value, path) {
    if (!isObject(value)) return;
    for (const name of names) check.report([...path, name], !Object.hasOwn(value, name) && "is missing");
  },
  properties(check, schemas, value, path) {
    if (!isObject(value)) return;
    for (const [name, schema] of Object.entries(schemas))
      if (Object.hasOwn(value, name)) check.run(schema, value[name], [...path, name]);
  },
  patternProperties(check, schemas, value, path) {
    if (!isObject(value)) return;
    for (const [pattern, schema] of Object.entries(schemas))
      for (const name of Object.keys(value))
        if (new RegExp(pattern, "u").test(name)) check.run(schema, value[name], [...path, name]);
  },
  additionalProperties(check, schema, value, path, { properties = {}, patternProperties = {} }) {
    if (!isObject(value)) return;
    const patterns = Object.keys(patternProperties).map((pattern) => new RegExp(pattern, "u"));
    for (const name of Object.keys(value)) {
      const isListed = Object.hasOwn(properties, name) || patterns.some((pattern) => pattern.test(name));
      if (!isListed) check.run(schema, value[name], [...path, name]);
    }
  },
  prefixItems(check, schemas, value, path) {
    if (!Array.isArray(value)) return;
    schemas.slice(0, value.length).forEach((schema, at) => check.run(schema, value[at], [...path, at]));
  },
  items(check, schema, value, path, { prefixItems = [] }) {
    if (!Array.isArray(value)) return;
    for (let at = prefixItems.length; at < value.length; at++)
      check.run(schema, value[at], [...path, at]);
  },
  allOf(check, schemas, value, path) {
    for (const schema of schemas) check.run(schema, value, path);
  },
  anyOf(check, schemas, value, path) {
    const fits = schemas.some((schema) => check.fits(schema, value));
    check.report(path, !fits && "fits none of the schema's alternatives");
  },
  oneOf(check, schemas, value, path) {
    const fits = schemas.filter((schema) => check.fits(schema, value)).length;
    check.report(path, fits !== 1 && `fits ${fits} of the schema's alternatives, not 1`);
  },
  not(check, schema, value, path) {
    check.report(path, check.fits(schema, value) && "fits a schema that it must not");
  },
  $ref(check, pointer, value, path) {
    const schema = check.resolve(pointer);
    if (schema === undefined) check.unread.add("$ref");
    else check.run(schema, value, path);
  },
};

const nameOf = (path) =>
  path.map((part) => (isNumber(part) ? `[${part}]` : `.${part}`)).join("").replace(/^\./, "");

class Check {
  problems = [];
  unread = new Set();
  #root;
  #depth = 0;

  constructor(root) {
    this.#root = root;
  }

  report(path, problem) {
    if (problem) this.problems.push(path.length ? `${nameOf(path)}: ${problem}` : problem);
  }

  run(schema, value, path) {
    if (schema === false) this.report(path, "is not permitted");
    if (!isObject(schema)) return;
    if (this.#depth > MAX_DEPTH) return void this.unread.add("$ref");
    this.#depth++;
    for (const [keyword, argument] of Object.entries(schema)) {
      if (!Object.hasOwn(KEYWORDS, keyword)) {
        if (!ANNOTATIONS.has(keyword)) this.unread.add(keyword);
        continue;
      }
      try {
        KEYWORDS[keyword](this, argument, value, path, schema);
      } catch {
        this.unread.add(keyword); // its argument is not what a schema has there
      }
    }
    this.#depth--;
  }

  fits(schema, value) {
    const before = this.problems;
    this.problems = [];
    this.run(schema, value, []);
    const { length } = this.problems;
    this.problems = before;
    return length === 0;
  }

  /** What #/$defs/name and the like stand for. */
  resolve(pointer) {
    if (pointer !== "#" && !pointer.startsWith("#/")) return undefined;
    const names = pointer.split("/").slice(1);
    return names
      .map((name) => decodeURIComponent(name).replaceAll("~1", "/").replaceAll("~0", "~"))
      .reduce((node, name) => (Object.hasOwn(node ?? {}, name) ? node[name] : undefined), this.#root);
  }
}

/** { problems, unread }: lines that say what is wrong, and keywords that were not checked. */
export function check(schema, value) {
  const work = new Check(schema);
  work.run(schema, value, []);
  return { problems: work.problems, unread: [...work.unread] };
}
