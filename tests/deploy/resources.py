"""Kinds of Kubernetes resources as models that refuse unknown fields.

Pods, Services, autoscalers and JobSets are those of `kubeflow-trainer-api`. What it lacks is
declared here, with the fields that `docs/deploy` uses: apps/v1 of Kubernetes 1.34, ray.io/v1 of
KubeRay 1.6, leaderworkerset.x-k8s.io/v1 of LeaderWorkerSet 0.7, and monitoring.coreos.com/v1 of
Prometheus Operator 0.86.
"""

from typing import Annotated, Any, Literal

from kubeflow_trainer_api import models as known
from pydantic import BaseModel, Field, ValidationError

Pod = known.IoK8sApiCoreV1PodTemplateSpec
Meta = known.IoK8sApimachineryPkgApisMetaV1ObjectMeta
Selector = known.IoK8sApimachineryPkgApisMetaV1LabelSelector
Count = Annotated[int, Field(ge=0, strict=True)]


class RollingUpdate(BaseModel):
    maxUnavailable: Count | str | None = None
    maxSurge: Count | str | None = None


class Strategy(BaseModel):
    type: Literal["RollingUpdate", "Recreate"]
    rollingUpdate: RollingUpdate | None = None


class DeploymentSpec(BaseModel):
    selector: Selector
    template: Pod
    replicas: Count | None = None
    strategy: Strategy | None = None


class Deployment(BaseModel):
    apiVersion: Literal["apps/v1"]
    kind: Literal["Deployment"]
    metadata: Meta
    spec: DeploymentSpec


class Job(BaseModel):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Meta
    spec: known.IoK8sApiBatchV1JobSpec


class Credentials(BaseModel):
    name: str
    key: str


class Authorization(BaseModel):
    type: str = "Bearer"
    credentials: Credentials


class Endpoint(BaseModel):
    port: str
    path: str
    interval: Annotated[str, Field(pattern=r"^[0-9]+(ms|s|m|h)$")]
    authorization: Authorization | None = None


class PodMonitorSpec(BaseModel):
    selector: Selector
    podMetricsEndpoints: list[Endpoint]


class PodMonitor(BaseModel):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Meta
    spec: PodMonitorSpec


class LeaderWorkerTemplate(BaseModel):
    workerTemplate: Pod
    leaderTemplate: Pod | None = None
    size: Annotated[Count, Field(ge=1)] = 1
    restartPolicy: Literal["RecreateGroupOnPodRestart", "None"] | None = None


class LeaderWorkerSetSpec(BaseModel):
    leaderWorkerTemplate: LeaderWorkerTemplate
    replicas: Count | None = None
    startupPolicy: Literal["LeaderCreated", "LeaderReady"] | None = None


class LeaderWorkerSet(BaseModel):
    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: Meta
    spec: LeaderWorkerSetSpec


class HeadGroup(BaseModel):
    template: Pod
    rayStartParams: dict[str, str] = {}


class WorkerGroup(HeadGroup):
    groupName: str
    replicas: Count
    minReplicas: Count
    maxReplicas: Annotated[Count, Field(ge=1)]


class AuthOptions(BaseModel):
    mode: Literal["disabled", "token"]


class RayClusterSpec(BaseModel):
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup] = []
    rayVersion: str
    authOptions: AuthOptions | None = None
    enableInTreeAutoscaling: bool = False


class RayServiceSpec(BaseModel):
    serveConfigV2: str
    rayClusterConfig: RayClusterSpec


class RayService(BaseModel):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Meta
    spec: RayServiceSpec


class ServeApplication(BaseModel):
    name: str
    import_path: str
    route_prefix: str
    args: dict[str, Any]


class HttpOptions(BaseModel):
    host: str
    port: Count


class ServeConfig(BaseModel):
    """What `serveConfigV2` holds."""

    proxy_location: Literal["EveryNode", "HeadOnly", "Disabled"]
    http_options: HttpOptions
    applications: list[ServeApplication]


KINDS: dict[str, type[BaseModel]] = {
    "Deployment": Deployment,
    "Service": known.IoK8sApiCoreV1Service,
    "HorizontalPodAutoscaler": known.IoK8sApiAutoscalingV2HorizontalPodAutoscaler,
    "PodMonitor": PodMonitor,
    "LeaderWorkerSet": LeaderWorkerSet,
    "Job": Job,
    "JobSet": known.JobsetV1alpha2JobSet,
    "RayService": RayService,
}
# Numbers or strings, which that package declares as objects.
_SCALARS = {"IoK8sApimachineryPkgApiResourceQuantity", "IoK8sApimachineryPkgUtilIntstrIntOrString"}


def problems(resource: dict[str, Any], model: type[BaseModel] | None = None) -> list[str]:
    """What is wrong with a resource, and where; by its kind, unless a model is given."""
    try:
        (model or KINDS[resource["kind"]]).model_validate(resource, extra="forbid")
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors()
            if not (
                each["type"] == "model_type"
                and each["ctx"]["class_name"] in _SCALARS
                and isinstance(each["input"], int | str)
            )
        ]
    return []
